"""The stacks and drivers of a comparison, equal in everything that is not compared. Starts nothing itself."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from inflight.bench.comparison.options import ENGINE_MODE, PLAIN, VLLM_MODE, BenchOptions, Variant
from inflight.bench.peers.catalogue import READS_GGUF, SOURCES, PeerChoice, parse_peer, peer_environment
from inflight.bench.peers.driver import Setup, context_tokens
from inflight.bench.targets.driven import START_TIMEOUT_S, Driver
from inflight.bench.targets.model import LocalModel, local_model
from inflight.bench.workloads.generate import build_workload
from inflight.bench.workloads.plan import GATE_TOKENS, Workload
from inflight.common.disk_cache import cache_folder
from inflight.common.machine import num_usable_cores
from inflight.executor.entry import SPIN_COUNT
from inflight.local.options import StackOptions

# Room for the gate, for the sequences that an executor holds beyond its seats, and for the prefix cache.
EXTRA_SEATS = 4
# Most tokens by which a block outgrows what it holds.
BLOCK_SLACK_TOKENS = 16

RUN_FOLDER = Path("run")
COMMAND = "inflight.cli.main"


def stack_options(options: BenchOptions, mode: str, variant: Variant = PLAIN) -> StackOptions:
    """Returns the stack of one mode. Everything but the mode is the same, the size of the KV pool included; with vLLM,
    what its peer has."""
    if mode == VLLM_MODE:
        return _vllm_stack_options(options, variant)
    return StackOptions(
        executors=options.executors,
        model=options.model,
        executor_args=(*_executor_flags(options, mode), *variant.flags),
        run_dir=RUN_FOLDER / f"bench-{variant.mode(mode)}",
    )


def _vllm_stack_options(options: BenchOptions, variant: Variant) -> StackOptions:
    model = local_model(options.model)
    python, own = vllm_program()
    flags = shlex.join(vllm_flags(options, model))
    return StackOptions(
        executors=options.executors,
        model=options.model,
        executor_program=("env", *(f"{name}={value}" for name, value in own.items()), python, "-P", "-m", COMMAND),
        executor_model=(str(model.folder), model.name),
        executor_args=(
            *("--engine", "vllm", f"--engine-args={flags}", "--max-num-sequences", str(options.seats)),
            *variant.flags,
        ),
        run_dir=RUN_FOLDER / f"bench-{variant.mode(VLLM_MODE)}",
        start_timeout_s=START_TIMEOUT_S,
    )


def vllm_program() -> tuple[str, dict[str, str]]:
    """Returns the Python that has vLLM, and what its environment has besides this process's."""
    (peer,) = parse_peer("vllm")
    base = {"PATH": os.environ.get("PATH", "")}
    own = {name: value for name, value in peer_environment(peer, base, usable_cores()).items() if name not in base}
    return os.environ.get("INFLIGHT_VLLM_PYTHON") or peer.command[0], own


def vllm_flags(options: BenchOptions, model: LocalModel) -> list[str]:
    """Returns the flags with which vLLM has as much room as every target."""
    setup = _setup(options, str(model.folder), ())
    return ["--dtype", setup.dtype, "--max-model-len", str(context_tokens(setup))]


def engine_driver(options: BenchOptions, variant: Variant = PLAIN) -> Driver:
    """Our engine alone, as an executor of a stack would have it."""
    return Driver(
        mode=variant.mode(ENGINE_MODE),
        command=(sys.executable, "-P", "-m", "inflight.bench.targets.engine_driver"),
        environment={
            "GOMP_SPINCOUNT": SPIN_COUNT,
            **os.environ,
            "PYTHONPATH": _with_sources(os.environ.get("PYTHONPATH", "")),
        },
        setup=_setup(options, options.model or "", (*_executor_flags(options, "inflight"), *variant.flags)),
        log_file=RUN_FOLDER / "bench-engine" / f"{variant.mode(ENGINE_MODE)}.log",
    )


def peer_driver(options: BenchOptions, peer: PeerChoice, model: LocalModel) -> Driver:
    """Another engine with as many seats and cores."""
    source = (model.gguf_file if peer.name in READS_GGUF else None) or model.folder
    return Driver(
        mode=peer.mode,
        command=peer.command,
        environment=peer_environment(peer, os.environ, usable_cores()),
        setup=_setup(options, str(source), (), peer.variant),
        log_file=RUN_FOLDER / "bench-peers" / f"{peer.mode}.log",
    )


def usable_cores() -> Sequence[int]:
    """Returns the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))[: num_usable_cores()]
    return range(num_usable_cores())


def planned_workload(options: BenchOptions, name: str, vocabulary_size: int, variant: int = 0) -> Workload:
    """Returns a workload as the options want it."""
    return build_workload(
        name,
        vocabulary_size=vocabulary_size,
        scale=options.scale,
        num_requests=options.num_requests,
        seed=options.seed,
        variant=variant,
        arrivals=options.arrivals,
    )


def _setup(options: BenchOptions, model: str, arguments: tuple[str, ...], variant: str = "") -> Setup:
    return Setup(
        model=model,
        cache_folder=str(cache_folder()),
        seats=options.seats,
        max_request_tokens=_max_request_tokens(options),
        num_threads=num_usable_cores(),
        variant=variant,
        arguments=arguments,
    )


def _executor_flags(options: BenchOptions, mode: str) -> tuple[str, ...]:
    flags = {
        "--batching": mode,
        "--max-num-sequences": options.seats,
        "--max-tokens-in-paged-kv-cache": (options.seats + EXTRA_SEATS)
        * (_max_request_tokens(options) + BLOCK_SLACK_TOKENS),
    }
    return (*(str(part) for flag in flags.items() for part in flag), *options.executor_args)


def _max_request_tokens(options: BenchOptions) -> int:
    workloads = (planned_workload(options, name, vocabulary_size=1) for name in options.workloads)
    return max(GATE_TOKENS, *(workload.max_request_tokens for workload in workloads))


def _with_sources(python_path: str) -> str:
    """Returns the path with the generated code, which is a separate folder in a source checkout."""
    parts = [str(SOURCES), python_path]
    return os.pathsep.join(part for part in parts if part)
