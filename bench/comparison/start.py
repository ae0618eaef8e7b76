"""The start of all targets of a comparison. A peer that cannot run here is left out with the reason."""

from __future__ import annotations

import platform
import shlex
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from inflight import AsyncClient
from inflight.bench.comparison.options import ENGINE_MODE, PLAIN, SHARED_CALLS, VLLM_MODE, BenchOptions, Variant
from inflight.bench.comparison.progress import Progress
from inflight.bench.comparison.stacks import engine_driver, peer_driver, stack_options
from inflight.bench.peers.catalogue import PeerChoice, missing_words, shortcomings
from inflight.bench.targets.driven import driven
from inflight.bench.targets.model import LocalModel, local_model
from inflight.bench.targets.stack import StackTarget, sessions_of
from inflight.bench.targets.target import Target, TargetError
from inflight.catalogue import Model
from inflight.cli.console import CommandError
from inflight.cli.doctor import processor
from inflight.cli.flags import access_of_environment
from inflight.common.machine import num_usable_cores
from inflight.local.stack import LocalStack


@dataclass(slots=True)
class Field:
    """All that takes part, in the order in which it was started, and what could not, with the reason."""

    model_name: str
    vocabulary_size: int
    targets: list[Target] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    peer_modes: tuple[str, ...] = ()
    modes: list[str] = field(default_factory=list)

    def enter(self, target: Target) -> None:
        self.targets.append(target)
        self.modes.append(target.mode)

    def leave_out(self, target: Target, reason: str) -> None:
        self.targets.remove(target)
        self.left_out[target.mode] = reason

    def place(self, mode: str) -> int:
        """Where a mode comes in the order of starting."""
        return self.modes.index(mode)


async def start_field(options: BenchOptions, opened: AsyncExitStack, progress: Progress) -> Field:
    """Starts everything; it ends with `opened`."""
    if options.address is not None:
        return await _field_elsewhere(options, options.address, opened)
    model = local_model(options.model)
    started = Field(model.name, model.vocabulary_size, peer_modes=tuple(peer.mode for peer in options.peers))
    for variant in (PLAIN, *options.variants):
        await _start_ours(options, variant, started, opened, progress)
    for peer in options.peers:
        progress.say(f"starting {peer.mode}")
        try:
            started.enter(await _start_peer(options, peer, model, opened))
        except TargetError as error:
            started.left_out[peer.mode] = str(error)
            progress.say(f"without {error}")
    return started


async def _start_ours(
    options: BenchOptions, variant: Variant, started: Field, opened: AsyncExitStack, progress: Progress
) -> None:
    for mode in options.stack_modes:
        progress.say(f"starting the {variant.mode(mode)} stack")
        for target in await _start_stack(options, mode, variant, opened):
            started.enter(target)
    if ENGINE_MODE in options.modes:
        progress.say(f"starting the {variant.mode(ENGINE_MODE)} alone")
        engine = await opened.enter_async_context(driven(engine_driver(options, variant), options.slo))
        engine.words.update(_words_of(variant))
        started.enter(engine)


async def _field_elsewhere(options: BenchOptions, address: str, opened: AsyncExitStack) -> Field:
    """Returns a router that runs already, under the name of the batching that its executors do."""
    access = access_of_environment()
    async with AsyncClient(address, **access) as client:
        model = await _only_model(client)
        executors = (await client.capacity()).executors
    mode = "+".join(sorted({executor.batching for executor in executors})) or "no executor"
    elsewhere = Field(model.name, model.vocabulary_size)
    for calls in options.calls:
        client = await opened.enter_async_context(_client(address, calls, **access))
        target = StackTarget(_mode(mode, calls), address, client, options.slo, {}, {"router": address})
        for one in target.at_intervals(options.stream_intervals):
            elsewhere.enter(one)
    return elsewhere


def _client(address: str, calls: str, **access: Any) -> AsyncClient:
    return AsyncClient(address, share_calls=calls == SHARED_CALLS, **access)


def _mode(mode: str, calls: str) -> str:
    """Returns the name of a mode whose client makes such calls."""
    return mode if calls == SHARED_CALLS else f"{mode}-{calls}"


async def _only_model(client: AsyncClient) -> Model:
    models = await client.list_models()
    if len(models) != 1:
        raise CommandError(f"a benchmark needs a router with one model, not {len(models)}")
    return models[0]


async def _start_stack(options: BenchOptions, mode: str, variant: Variant, opened: AsyncExitStack) -> list[StackTarget]:
    stack = await opened.enter_async_context(LocalStack(stack_options(options, mode, variant)))
    words = {"engine": f"inflight {metadata.version('inflight')}, 1 router, executors: {options.executors}"}
    words |= _words_of(variant)
    targets: list[StackTarget] = []
    for calls in options.calls:
        client = await opened.enter_async_context(_client(stack.address, calls))
        name = _mode(variant.mode(mode), calls)
        paused = tuple(child.pid for child in stack.executors) if mode == VLLM_MODE else ()
        target = StackTarget(name, stack.address, client, options.slo, sessions_of(stack), words, paused=paused)
        target.signal(signal.SIGSTOP)
        opened.callback(target.signal, signal.SIGCONT)  # a stopped process cannot end
        targets += target.at_intervals(options.stream_intervals)
    return targets


def _words_of(variant: Variant) -> dict[str, str]:
    return {"flags": shlex.join(variant.flags)} if variant.flags else {}


async def _start_peer(options: BenchOptions, peer: PeerChoice, model: LocalModel, opened: AsyncExitStack) -> Target:
    if not peer.is_installed:
        raise TargetError(missing_words(peer))
    target = await opened.enter_async_context(driven(peer_driver(options, peer, model), options.slo))
    target.words.update(shortcomings(peer))
    return target


def circumstances(options: BenchOptions, started: Field) -> dict[str, str]:
    """Under which the figures came about, in words."""
    shape = f"scale {options.scale:g}, seed {options.seed}, rounds: {options.rounds}"
    machine = f"{num_usable_cores()} cores, {platform.machine()}, Python {platform.python_version()}"
    here = {"machine": machine, "processor": processor().text, "torch": metadata.version("torch")}
    targets = {
        target.mode: ", ".join(text if name == "engine" else f"{name}: {text}" for name, text in target.words.items())
        for target in started.targets
    }
    return {
        "model": started.model_name,
        **({} if options.address is not None else here),
        "seats": str(options.seats),
        "workload": shape,
        **targets,
        **{f"without {mode}": reason for mode, reason in started.left_out.items()},
    }
