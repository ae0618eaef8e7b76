"""Drives our own engine alone: scheduler, loop and model in one process, no gRPC and no Redis.

The difference to a whole stack is what the stack costs. Speaks the drivers' protocol, so that its times compare with
those of other engines. What the router's ledger does for a stack, `_Admission` does here: who has no room waits.
"""

from __future__ import annotations

import queue
import sys
import time
from collections import deque
from typing import Any

from bench.peers.driver import CannotRun, Request, Setup, TokenBatch, serve
from common.settings import SettingError, load
from executor.blocks import BlockPool
from executor.engine import Engine, EngineOutput, EngineStatus
from executor.main import Loaded, load_model
from executor.runner import ModelRunner
from executor.scheduler import Scheduler
from executor.sequence import Sampling, Sequence, Stopping
from executor.settings import ExecutorSettings

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
CACHE_SALT = b"bench"
# Figures that an engine may give of itself in its status, as they are named there.
STATUS_FIGURES = ("device_busy_fraction", "exposed_host_ms")


class _Admission:
    """Who may go to the engine: those whose blocks and place are free, in order of arrival."""

    def __init__(self, loaded: Loaded, block_size: int) -> None:
        self._block_size = block_size
        self._free_blocks = loaded.num_blocks
        self._free_places = loaded.limits.max_num_sequences + loaded.limits.num_standby_sequences
        self._waiting: deque[Sequence] = deque()

    def wait(self, request: Request) -> None:
        """Takes a request in at the end of the line."""
        num_tokens = len(request.prompt_ids) + request.output_tokens
        self._waiting.append(
            Sequence(
                request_id=str(request.id),
                attempt=time.monotonic_ns(),  # ids begin anew with every run, attempts may not
                token_ids=list(request.prompt_ids),
                num_prompt_tokens=len(request.prompt_ids),
                sampling=GREEDY,
                stopping=Stopping(request.output_tokens, 0, frozenset()),
                num_reserved_blocks=-(-num_tokens // self._block_size),
                cache_salt=CACHE_SALT,
            )
        )

    def next(self) -> Sequence | None:
        """The head of the line if it fits."""
        if not self._waiting or self._free_places == 0:
            return None
        if self._waiting[0].num_reserved_blocks > self._free_blocks:
            return None
        sequence = self._waiting.popleft()
        self._free_blocks -= sequence.num_reserved_blocks
        self._free_places -= 1
        return sequence

    def leave(self, sequence: Sequence) -> None:
        """Takes blocks and place back."""
        self._free_blocks += sequence.num_reserved_blocks
        self._free_places += 1


class OwnEngine:
    """The engine with its thread; outputs come with the time at which the engine published them."""

    def __init__(self, setup: Setup) -> None:
        settings = _settings(setup)
        loaded = load_model(settings)
        self._outputs: queue.SimpleQueue[tuple[float, EngineOutput]] = queue.SimpleQueue()
        self._died: BaseException | None = None
        self._admission = _Admission(loaded, settings.tokens_per_block)
        scheduler = Scheduler(loaded.limits, BlockPool(loaded.num_blocks, settings.tokens_per_block))
        runner = ModelRunner(loaded.model, settings.tokens_per_block)
        self._engine = Engine(scheduler, runner, self._publish, self._on_death)
        self._engine.start()
        self._status: EngineStatus | None = None
        self._num_steps_before = 0
        self._words = {
            "engine": "inflight, the executor's engine alone",
            "backend": loaded.model.backend_name,
            "dtype": loaded.model.dtype_name,
        }

    def describe(self) -> dict[str, str]:
        """What runs, in words."""
        return self._words

    def add(self, request: Request) -> None:
        """Takes a request; it goes to the engine as soon as it fits."""
        self._admission.wait(request)
        self._submit_what_fits()

    def advance(self, wait_s: float | None) -> list[TokenBatch]:
        """Waits for the next output of the engine's thread."""
        try:
            at, output = self._outputs.get(timeout=wait_s)
        except queue.Empty:
            return []
        if self._died is not None:
            raise RuntimeError(f"the engine died: {self._died}")
        if output.rejected:
            sequence, refusal = output.rejected[0]
            raise RuntimeError(f"the engine refused request {sequence.request_id}: {refusal.value}")
        self._status = output.status or self._status
        for end in output.finished:
            self._admission.leave(end.sequence)
        if output.finished:
            self._submit_what_fits()
        tokens = [(int(event.sequence.request_id), 1) for event in output.tokens]
        return [TokenBatch(at, tokens)] if tokens else []

    def figures(self) -> dict[str, float]:
        """Steps of the run, and what else the engine's status says."""
        if self._status is None:
            return {}
        num_steps = self._status.num_steps - self._num_steps_before
        self._num_steps_before = self._status.num_steps
        said: dict[str, Any] = {name: getattr(self._status, name, None) for name in STATUS_FIGURES}
        return {"num_steps": num_steps, **{name: value for name, value in said.items() if value is not None}}

    def _submit_what_fits(self) -> None:
        while (sequence := self._admission.next()) is not None:
            self._engine.submit(sequence)

    def _publish(self, output: EngineOutput) -> None:
        self._outputs.put((time.monotonic(), output))

    def _on_death(self, error: BaseException) -> None:
        self._died = error
        self._outputs.put((time.monotonic(), EngineOutput(0)))


def _settings(setup: Setup) -> ExecutorSettings:
    model = ["--model", setup.model] if setup.model else []
    try:
        return load(ExecutorSettings, "inflight bench", [*model, *setup.arguments])
    except SettingError as error:
        raise CannotRun(str(error)) from None


if __name__ == "__main__":
    sys.exit(serve(OwnEngine))
