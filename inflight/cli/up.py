"""`inflight up`: a local stack, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console

from inflight.cli.console import EXIT_FAILURE, EXIT_USAGE, CommandError, open_console, run_in_foreground
from inflight.cli.flags import add_run_dir_flag, resolve_run_dir
from inflight.cli.parser import CommandParser
from inflight.common.model_source import resolve_model
from inflight.local.display import StackDisplay
from inflight.local.gpus import default_routers, num_gpus
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack, StackError, describe_exit, describe_log
from inflight.local.state import DEFAULT_RUN_DIR

# The usual port of OpenAI-compatible servers.
DEFAULT_GATEWAY_PORT = 8000

# Settings of `inflight executor` that are also flags of `up`; they are passed on unchanged.
EXECUTOR_FLAGS = {
    "--batching": "inflight, or static: a batch finishes before the next one starts (default: inflight)",
    "--max-num-sequences": "seats of each executor (default: from the KV cache)",
    "--max-num-tokens": "maximum number of tokens of a step (default: from the memory of the device)",
    "--max-tokens-in-paged-kv-cache": "size of each executor's KV pool in tokens (default: from free memory)",
    "--dtype": "type of weights and KV: bfloat16, float32 or auto (default: auto)",
}

# Of executors with another engine.
ENGINES = ("inflight", "vllm")

# The same of `inflight router`.
ROUTER_FLAGS = {
    "--admission-file": "TOML file with tenant limits and model variants; read again when it changes (default: none)",
    "--max-queue-requests": "maximum number of waiting requests of a model; more are refused (default: 10000)",
}


# Flags whose values are flags themselves.
ARGS_FLAGS = ("--executor-args", "--router-args", "--gateway-args", "--engine-args")


class _UpParser(CommandParser):
    """The parser of `up`. argparse takes a value such as `--insecure` for a flag unless it is joined to its own flag
    with `=`."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words, joined = iter(sys.argv[1:] if args is None else args), []
        for word in words:
            value = next(words, None) if word in ARGS_FLAGS else None
            joined.append(word if value is None else f"{word}={value}")
        return super().parse_args(joined, namespace)


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    options = stack_options(_parser().parse_args(argv))
    return run_in_foreground(lambda: _up(options))


def stack_options(flags: argparse.Namespace) -> StackOptions:
    """Returns the stack that the flags ask for."""
    try:
        return StackOptions(
            executors=flags.executors,
            routers=default_routers(flags.executors, num_gpus()) if flags.routers is None else flags.routers,
            model=flags.model or None,
            executor_args=(
                *_engine_words(flags),
                *_given(flags, EXECUTOR_FLAGS),
                *_split("--executor-args", flags.executor_args),
            ),
            executor_program=_program_of(flags.engine_python),
            executor_model=_model_of_vllm(flags.model) if flags.engine == "vllm" else None,
            router_args=(*_given(flags, ROUTER_FLAGS), *_split("--router-args", flags.router_args)),
            gateway_args=_split("--gateway-args", flags.gateway_args),
            gateways=int(flags.gateway or flags.gateway_port is not None),
            port=flags.port,
            http_port=flags.http_port,
            gateway_port=_gateway_port(flags),
            redis_url=flags.redis_url,
            run_dir=resolve_run_dir(flags),
            tls=flags.tls,
        )
    except ValueError as error:
        raise CommandError(str(error), EXIT_USAGE) from None


def _engine_words(flags: argparse.Namespace) -> tuple[str, ...]:
    if flags.engine == "inflight":
        if flags.engine_python or flags.engine_args:
            raise ValueError("--engine-python and --engine-args are for another engine: --engine vllm")
        return ()
    return ("--engine", flags.engine, *([f"--engine-args={flags.engine_args}"] if flags.engine_args else []))


def _program_of(python: str | None) -> tuple[str, ...] | None:
    return None if python is None else (python, "-P", "-m", "inflight.cli.main")


def _model_of_vllm(model: str) -> tuple[str, str] | None:
    """Returns the folder that vLLM reads, and the model's name; None if it reads the model itself. Raises
    `ModelError`."""
    source = resolve_model(model or "")
    if source.gguf_file is None:
        return None
    # Imported here: it takes torch, which this process needs for nothing else.
    from inflight.executor.checkpoint.gguf import import_gguf

    return str(import_gguf(source)), source.name


def _split(flag: str, words: str) -> tuple[str, ...]:
    """Returns the words of a flag's value, which is quoted as in a shell."""
    try:
        return tuple(shlex.split(words))
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def _gateway_port(flags: argparse.Namespace) -> int | None:
    """Returns the gateway's port; None for a free one."""
    if flags.gateway_port is None:
        return DEFAULT_GATEWAY_PORT if flags.gateway else None
    return int(flags.gateway_port) or None


def _given(flags: argparse.Namespace, names: Iterable[str]) -> Iterator[str]:
    """Yields the flags of this list that were given, with their values."""
    for name in names:
        value = getattr(flags, name.strip("-").replace("-", "_"))
        if value is not None:
            yield from (name, value)


async def _up(options: StackOptions) -> int:
    console = open_console()
    try:
        with StackDisplay(console) as display:
            async with LocalStack(options, display.show) as stack:
                _greet(console, stack)
                try:
                    return await _supervise(stack)
                except asyncio.CancelledError:
                    return 0  # Ctrl-C is the normal end
    except StackError as error:
        raise CommandError(str(error), EXIT_USAGE if error.is_setting else EXIT_FAILURE) from None


def _greet(console: Console, stack: LocalStack) -> None:
    run_dir = stack.options.run_dir
    where = "" if run_dir == DEFAULT_RUN_DIR else f" --run-dir {shlex.quote(str(run_dir))}"
    router = stack.routers[0]
    lines = [
        f"Ready: {', '.join(stack.router_addresses)}",
        *(f"  OpenAI-compatible API  http://{address}/v1" for address in stack.gateway_addresses),
        f"  dashboard              http://{router.http_address}/",
        f"  metrics                {_metrics_urls(stack)}",
        f'  inflight generate{where} "Name three fruits."',
        f"  inflight top{where}",
        f"Ctrl-C stops it. Logs are in {stack.options.run_dir}.",
    ]
    console.print("\n".join(lines))


def _metrics_urls(stack: LocalStack) -> str:
    children = (*stack.routers, *stack.executors, *stack.gateways)
    return " ".join(f"http://{child.http_address}/metrics" for child in children)


async def _supervise(stack: LocalStack) -> int:
    """Reports every process that ends by itself; returns when no router or no executor is left."""
    while stack.routers and stack.executors:
        child = await stack.wait_for_exit()
        print(f"error: {describe_exit(child)}\n{describe_log(child)}", file=sys.stderr, flush=True)
    print("error: no router or no executor is left", file=sys.stderr)
    return EXIT_FAILURE


def _parser() -> argparse.ArgumentParser:
    parser = _UpParser(
        prog="inflight up",
        description="Starts a private Redis, executors, routers and optionally a gateway on this machine, and waits "
        "until they serve. Ctrl-C stops them; a second Ctrl-C kills them.",
    )
    parser.add_argument(
        "--executors",
        type=int,
        default=1,
        metavar="N",
        help="number of executors, each with GPUs of its own (default: 1)",
    )
    parser.add_argument(
        "--routers",
        type=int,
        metavar="N",
        help="number of routers (default: 1, or one for each executor with a GPU)",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="local Hugging Face folder, GGUF file or hub name; default: SmolLM2-135M-Instruct",
    )
    parser.add_argument("--port", type=int, metavar="PORT", help="port of the first router; default: a free port")
    parser.add_argument(
        "--http-port",
        type=int,
        metavar="PORT",
        help="port of the first router's metrics and dashboard; default: a free port",
    )
    parser.add_argument("--gateway", action="store_true", help="also start the OpenAI-compatible HTTP gateway")
    parser.add_argument(
        "--gateway-port",
        type=int,
        metavar="PORT",
        help=f"port of the gateway, 0 for a free port; implies --gateway (default: {DEFAULT_GATEWAY_PORT})",
    )
    parser.add_argument("--redis-url", metavar="URL", help="use this Redis instead of a private one")
    parser.add_argument(
        "--tls",
        action="store_true",
        help="use TLS to routers and mutual TLS to executors, with certificates created in the run directory",
    )
    add_run_dir_flag(parser)
    _add_executor_flags(parser)
    group = parser.add_argument_group("routers")
    for flag, text in ROUTER_FLAGS.items():
        group.add_argument(flag, metavar="VALUE", help=text)
    group.add_argument(
        "--router-args", default="", metavar="'ARGS'", help="more flags for every router: inflight router --help"
    )
    group = parser.add_argument_group("gateway")
    group.add_argument(
        "--gateway-args", default="", metavar="'ARGS'", help="more flags for the gateway: inflight gateway --help"
    )
    return parser


def _add_executor_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("executors")
    group.add_argument(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help="what computes: inflight's own engine, or vLLM, which is installed apart (default: inflight)",
    )
    group.add_argument(
        "--engine-python",
        metavar="PATH",
        help="Python of the environment with vLLM and inflight[vllm] (default: this one)",
    )
    group.add_argument(
        "--engine-args", default="", metavar="'ARGS'", help="flags of vLLM, such as '--max-model-len 4096'"
    )
    for flag, text in EXECUTOR_FLAGS.items():
        group.add_argument(flag, metavar="VALUE", help=text)
    group.add_argument(
        "--executor-args", default="", metavar="'ARGS'", help="more flags for every executor: inflight executor --help"
    )
