"""A step launched on the GPU, and the copy of its tokens to the host."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.executor.device import StepTimer, host_zeros
from inflight.executor.engine.runner import token_ids_of
from inflight.executor.gpu.processing import needs_tokens
from inflight.executor.scheduler.sequence import NO_LOGPROBS, PooledRows, TokenLogprobs
from inflight.executor.step.batch import pooled_sums
from inflight.executor.step.logprobs import StepLogprobs
from inflight.executor.step.sampling_columns import SamplingBatch


class ReadBack:
    """Host buffers for sampled ids. At most as many steps as buffers may be in flight."""

    def __init__(self, num_buffers: int, num_ids: int, device: torch.device) -> None:
        self._free = deque(host_zeros(num_ids, device) for _ in range(num_buffers))

    def start(self, sampled_ids: Tensor) -> Tensor:
        """Starts the copy and returns its target."""
        on_host = self._free[0]
        on_host[: len(sampled_ids)].copy_(sampled_ids, non_blocking=True)
        return self._free.popleft()  # only now, so that a failed copy takes no buffer

    def give_back(self, on_host: Tensor) -> None:
        """Returns a buffer whose content was read."""
        self._free.append(on_host)


@dataclass(frozen=True, slots=True, eq=False)
class PooledStates:
    """The hidden states of a plan's `pooled` rows, on the host once the step has ended; None without such rows."""

    hidden: Tensor | None = None
    rows: tuple[PooledRows, ...] = ()


NO_STATES = PooledStates()


class GpuStep:
    """A pending step. Steps must be read in the order of launch; `before` is the previous one.

    `allows_next` is False until the step was read, if it has rows whose next step needs its tokens on the host.
    `check` raises if the step has ended with tokens that have no meaning.
    """

    def __init__(
        self,
        timer: StepTimer,
        read_back: ReadBack,
        on_host: Tensor,
        sampling: SamplingBatch,
        before: GpuStep | None,
        reported: StepLogprobs | None = None,
        check: Callable[[], None] | None = None,
        pooled: PooledStates = NO_STATES,
    ) -> None:
        self.began_s = timer.began_s
        self.ended_s = timer.began_s
        self.copied_s = 0.0
        self._timer = timer
        self._read_back = read_back
        self._on_host = on_host
        self._sampling = sampling
        self.allows_next = not any(map(needs_tokens, sampling.processed.values()))
        self._before = before
        self._reported = reported
        self._check = check
        self._pooled = pooled

    def result(self) -> tuple[int | None, ...]:
        """Waits for the ids. May be called once."""
        before, self._before = self._before, None  # otherwise every step would keep the previous one alive
        try:
            try:
                self.ended_s = self._timer.wait(before.ended_s if before is not None else 0.0)
            finally:
                if self._check is not None:
                    self._check()
            self.copied_s = self._timer.copies_took_s()
            sampled_ids = self._on_host[: self._sampling.num_rows].tolist()
            self._sampling.append(sampled_ids)
            return token_ids_of(sampled_ids)
        finally:
            self.allows_next = True
            self._read_back.give_back(self._on_host)

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        return NO_LOGPROBS if self._reported is None else self._reported.read()

    def pooled(self) -> tuple[array[float], ...]:
        hidden = self._pooled.hidden
        return () if hidden is None else pooled_sums(hidden, self._pooled.rows)
