"""A driver of the engine alone: scheduler, loop and model in one process, no gRPC and no Redis.

The difference to a whole stack is what the stack costs. Speaks the drivers' protocol, so that its times compare with
those of other engines. What the router's ledger does for a stack, `_Admission` does here: who has no room waits.
"""

from __future__ import annotations

import queue
import sys
import time
from collections import deque

from inflight.bench.measures.run import DeviceTimes, device_figures
from inflight.bench.peers.driver import CannotRun, Request, Setup, TokenBatch, serve
from inflight.common.settings import SettingError, load
from inflight.executor.engine.gc import GarbageCollection
from inflight.executor.engine.output import EngineOutput
from inflight.executor.loader import Loaded, load_executor
from inflight.executor.main import make_engine, start_runner
from inflight.executor.scheduler.sequence import Sampling, Sequence, Stopping
from inflight.executor.settings import ExecutorSettings

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)


class _Admission:
    """Who may go to the engine: those whose blocks and place are free, in order of arrival."""

    def __init__(self, loaded: Loaded, settings: ExecutorSettings) -> None:
        self._block_size = settings.tokens_per_block
        self._target_ms = settings.inter_token_target_standard_ms or None
        self._free_blocks = loaded.num_blocks
        self._free_places = loaded.limits.max_num_sequences + loaded.limits.num_standby_sequences
        self._max_drafts = 0 if settings.speculation == "off" else settings.speculation_max_drafts
        # No run finds the KV or the answers of an earlier one, also where their prompts are the same.
        self.cache_salt = b"0"
        self._waiting: deque[Sequence] = deque()

    def wait(self, request: Request) -> None:
        """Takes a request in at the end of the line."""
        num_tokens = len(request.prompt_ids) + request.output_tokens
        self._waiting.append(
            Sequence(
                request_id=str(request.id),
                attempt=time.monotonic_ns(),  # ids start again with every run, attempts may not
                token_ids=list(request.prompt_ids),
                num_prompt_tokens=len(request.prompt_ids),
                sampling=GREEDY,
                stopping=Stopping(request.output_tokens, 0, frozenset()),
                num_reserved_blocks=-(-num_tokens // self._block_size),
                cache_salt=self.cache_salt,
                inter_token_target_ms=self._target_ms,
                max_drafts=self._max_drafts,
            )
        )

    def next(self) -> Sequence | None:
        """Returns the head of the queue if it fits."""
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
        loaded = load_executor(settings)
        self._outputs: queue.SimpleQueue[tuple[float, EngineOutput]] = queue.SimpleQueue()
        self._died: BaseException | None = None
        self._admission = _Admission(loaded, settings)
        self._num_runs = 0
        garbage = GarbageCollection()
        self._runner = start_runner(settings, loaded)
        self._engine = make_engine(settings, loaded, self._runner, self._publish, self._on_death, garbage)
        garbage.start()
        self._engine.start()
        self._times = self._times_before = DeviceTimes(0, 0.0, 0.0)
        self._words = {
            "engine": "inflight, the executor's engine alone",
            "backend": loaded.model.forward.backend_name,
            "dtype": loaded.model.description.dtype,
            "weights": loaded.model.description.weight_dtype,
        }

    def describe(self) -> dict[str, str]:
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
        if output.status is not None:
            status = output.status
            self._times = DeviceTimes(status.num_steps, status.device_busy_s, status.elapsed_s)
        for end in output.finished:
            self._admission.leave(end.sequence)
        if output.finished:
            self._submit_what_fits()
        tokens = [(int(sequence.request_id), 1) for sequence in output.tokens.sequences]
        return [TokenBatch(at, tokens)] if tokens else []

    def figures(self) -> dict[str, float]:
        """Steps of the run, and what else the engine's status says."""
        before, self._times_before = self._times_before, self._times
        self._num_runs += 1
        self._admission.cache_salt = str(self._num_runs).encode()
        return {
            "num_steps": self._times.num_steps - before.num_steps,
            **device_figures(before, self._times),
        }

    def close(self) -> None:
        self._engine.stop()
        self._runner.close()

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
