"""The `inflight` command: finds the subcommand and runs it.

`COMMANDS` is the whole list; a command is one line there and a module. A command's module is imported only when it is
called, so that `inflight --help` is quick and a client needs nothing of a server's. What a user can cause ends in one
line on standard error and an exit code, never in a traceback.

Exit codes: 0 success, 1 it did not work, 2 a wrong flag or setting, 130 interrupted.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from inflight.cli.outcome import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, CommandError


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand. `run` names its `function(argv) -> exit code` as `module:function`."""

    name: str
    summary: str
    run: str


COMMANDS = (
    Command("up", "start a whole system on this machine: Redis, executors, routers", "inflight.cli.up:main"),
    Command("generate", "stream the answer to one prompt", "inflight.cli.generate:main"),
    Command("chat", "talk with a model", "inflight.cli.chat:main"),
    Command("demo", "show in-flight batching live, against static batching", "inflight.cli.demo:main"),
    Command("status", "show what every executor holds and what waits", "inflight.cli.status:main"),
    Command("top", "show seats, KV blocks, queues and latencies live", "inflight.cli.top:main"),
    Command("stats", "print the same as lines of JSON", "inflight.cli.top:stats"),
    Command("size", "say what a model and its traffic need", "inflight.cli.size:main"),
    Command("explain", "say where a request stands and what it waits for", "inflight.cli.explain:main"),
    Command("cancel", "end a request by its id", "inflight.cli.cancel:main"),
    Command("models", "list the models that can be asked for", "inflight.cli.models:main"),
    Command("key", "make an API key", "inflight.cli.key:main"),
    Command("doctor", "say what this machine has and what would run on it", "inflight.cli.doctor:main"),
    Command("certs", "make certificates for trying TLS", "inflight.cli.certs:main"),
    Command("healthcheck", "ask a process whether it serves", "inflight.cli.healthcheck:main"),
    Command("kube-secrets", "make the secrets of a Kubernetes overlay", "inflight.cli.kube_secrets:main"),
    Command("pod-costs", "tell Kubernetes which executors to delete first", "inflight.cli.pod_costs:main"),
    Command("router", "run a router", "router.main:main"),
    Command("executor", "run an executor", "executor.entry:main"),
    Command("gateway", "run an OpenAI-compatible HTTP gateway", "gateway.main:main"),
    Command("bench", "measure throughput and latency", "bench.main:main"),
)
ALIASES = {"capacity": "status"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else EXIT_USAGE
    if arguments[0] == "--version":
        print(f"inflight {_version()}")
        return 0
    name, *rest = arguments
    command = {command.name: command for command in COMMANDS}.get(ALIASES.get(name, name))
    if command is None:
        print(f"error: there is no command {name!r}; {_nearest(name)}inflight --help lists them all", file=sys.stderr)
        return EXIT_USAGE
    return _run(command, rest)


def usage() -> str:
    """The text of `inflight --help`."""
    width = max(len(command.name) for command in COMMANDS)
    lines = [f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS]
    return "\n".join(
        (
            "usage: inflight COMMAND [options]",
            "",
            "LLM serving with in-flight batching.",
            "",
            *lines,
            "",
            "inflight COMMAND --help says more about a command.",
        )
    )


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, [*(command.name for command in COMMANDS), *ALIASES], n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def _run(command: Command, argv: list[str]) -> int:
    module_name, _, function_name = command.run.partition(":")
    package = module_name.partition(".")[0]
    try:
        if not _is_installed(module_name):
            raise CommandError(f"this installation has no {package!r} part, which inflight {command.name} needs")
        function = getattr(importlib.import_module(module_name), function_name)
        return int(function(argv))
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE


def _is_installed(module_name: str) -> bool:
    try:
        return importlib.util.find_spec(module_name) is not None
    except ModuleNotFoundError:  # the package around it is not there
        return False


def _version() -> str:
    try:
        return importlib.metadata.version("inflight")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
