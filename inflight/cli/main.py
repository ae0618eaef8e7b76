"""The `inflight` command: finds the subcommand and runs it.

`COMMANDS` is the whole list; a command is one line there and a module. A command's module is imported only when the
command is called, so `inflight --help` is quick and a client needs none of a server's packages. An error that a user
can cause ends in one line on standard error and an exit code, never in a traceback.

Exit codes: 0 success, 1 failure, 2 a wrong flag or setting or a missing package, 130 interrupted.
"""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from inflight.cli.console import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, CommandError
from inflight.common.version import installed_version

SERVE, GATEWAY, VLLM = "serve", "gateway", "vllm"
SERVERS = frozenset({"router", "executor", "gateway"})


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand. `run` names its `function(argv) -> exit code` as `module:function`.

    `extra` is the extra of the distribution whose packages the command needs; empty if the base installation has them.
    """

    name: str
    summary: str
    run: str
    extra: str = ""


COMMANDS = (
    Command("generate", "stream the answer to one prompt", "inflight.cli.generate:main"),
    Command("chat", "chat with a model", "inflight.cli.chat.main:main"),
    Command("embed", "print the embeddings of texts", "inflight.cli.embed.main:main"),
    Command("models", "list the models that the routers serve", "inflight.cli.models:main"),
    Command("status", "show executors and queues once", "inflight.cli.status:main"),
    Command("top", "show seats, KV blocks, queues and latencies live", "inflight.cli.top.main:main"),
    Command("stats", "print the statistics of `top` as JSON lines", "inflight.cli.top.main:stats"),
    Command("usage", "print what tenants have used, with costs", "inflight.cli.usage:main"),
    Command("explain", "show the state of a request and why it waits", "inflight.cli.explain:main"),
    Command("cancel", "cancel a request by its id", "inflight.cli.cancel:main"),
    Command("key", "create an API key", "inflight.cli.deploy.key:main"),
    Command("healthcheck", "check once whether a process serves", "inflight.cli.deploy.healthcheck:main"),
    Command("doctor", "check this machine for what serving needs", "inflight.cli.doctor:main"),
    Command("up", "start a local stack: Redis, executors, routers", "inflight.cli.up:main", SERVE),
    Command("demo", "compare in-flight with static batching, live", "inflight.cli.demo.main:main", SERVE),
    Command("bench", "measure throughput and latency", "inflight.bench.main:main", SERVE),
    Command("router", "run a router", "inflight.router.main:main", SERVE),
    Command("executor", "run an executor", "inflight.executor.entry:main", SERVE),
    Command("gateway", "run an OpenAI-compatible HTTP gateway", "inflight.gateway.main:main", GATEWAY),
    Command(
        "size", "estimate blocks, seats and executors for a model and its traffic", "inflight.cli.size:main", SERVE
    ),
    Command("fetch", "download a model into a folder", "inflight.cli.deploy.fetch:main", SERVE),
    Command("certs", "create certificates for development", "inflight.cli.deploy.certs:main", SERVE),
    Command(
        "kube-secrets", "create the Kubernetes secrets of a deployment", "inflight.cli.deploy.kube_secrets:main", SERVE
    ),
    Command("pod-costs", "set the deletion cost of executor pods", "inflight.cli.deploy.pod_costs:main", SERVE),
)
OURS = frozenset({"bench", "common", "executor", "gateway", "inflight", "router"})
ALIASES = {"capacity": "status"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Before gRPC is imported: its library writes a line of its own about each lost connection.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        return _main(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE


def _main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else EXIT_USAGE
    if arguments[0] == "--version":
        print(f"inflight {installed_version()}")
        return 0
    name, *rest = arguments
    command = {command.name: command for command in COMMANDS}.get(ALIASES.get(name, name))
    if command is None:
        print(f"error: unknown command {name!r}; {_nearest(name)}inflight --help lists all", file=sys.stderr)
        return EXIT_USAGE
    if command.name in SERVERS:
        _end_on_sigterm_while_loading()
    return _run(command, rest)


def _end_on_sigterm_while_loading() -> None:
    """The kernel drops a SIGTERM to a container's first process (PID 1) that has no handler for it."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def usage() -> str:
    """Returns the text of `inflight --help`."""
    width = max(len(command.name) for command in COMMANDS)

    def lines(extras: Sequence[str]) -> list[str]:
        return [f"  {one.name:<{width}}  {one.summary}" for one in COMMANDS if one.extra in extras]

    return "\n".join(
        (
            "usage: inflight COMMAND [options]",
            "",
            "LLM serving with in-flight (continuous) batching.",
            "",
            "Use routers:",
            *lines([""]),
            "",
            f"Run and plan a system ({_install(SERVE)}):",
            *lines([SERVE, GATEWAY]),
            "",
            "inflight COMMAND --help describes a command.",
        )
    )


def _install(extra: str) -> str:
    return f"pip install 'inflight[{extra}]'"


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, [*(command.name for command in COMMANDS), *ALIASES], n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def _run(command: Command, argv: list[str]) -> int:
    module_name, _, function_name = command.run.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        return int(function(argv))
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if not command.extra or package in OURS:
            raise
        # An executor around vLLM runs in vLLM's own environment.
        extra = VLLM if command.name == "executor" and VLLM in argv else command.extra
        print(f"error: inflight {command.name} needs {package}: {_install(extra)}", file=sys.stderr)
        return EXIT_USAGE
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
