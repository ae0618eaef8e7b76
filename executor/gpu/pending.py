"""A step launched on the GPU, and the copy of its tokens to the host."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from inflight.executor.engine.runner import token_ids_of
from inflight.executor.scheduler.sequence import NO_LOGPROBS, TokenLogprobs
from inflight.executor.step.logprobs import StepLogprobs
from inflight.executor.step.sampling_columns import SamplingBatch


class ReadBack:
    """Host buffers for sampled ids. At most as many steps as buffers may be in flight."""

    def __init__(self, num_buffers: int, num_ids: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._free = deque(torch.zeros(num_ids, dtype=torch.int32, pin_memory=is_cuda) for _ in range(num_buffers))

    def start(self, sampled_ids: Tensor) -> Tensor:
        """Starts the copy and returns its target."""
        on_host = self._free[0]
        on_host[: len(sampled_ids)].copy_(sampled_ids, non_blocking=True)
        return self._free.popleft()  # only now, so that a failed copy takes no buffer

    def give_back(self, on_host: Tensor) -> None:
        """Returns a buffer whose content was read."""
        self._free.append(on_host)


class StepTimer:
    """Begin and end of a step on the GPU, by events in its stream; on a CPU by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.began_s = time.perf_counter()
        is_cuda = device.type == "cuda"
        self._began = torch.cuda.Event(enable_timing=True) if is_cuda else None
        # Blocking: a waiting thread sleeps and leaves the core to others.
        self._ended = torch.cuda.Event(enable_timing=True, blocking=True) if is_cuda else None
        self._copied: torch.cuda.Event | None = None
        self._copied_s = self._ended_s = self.began_s
        if self._began is not None:
            self._began.record()

    def copied(self) -> None:
        """Marks the end of the copies between device and host memory."""
        self._copied_s = time.perf_counter()
        if self._began is not None:
            self._copied = torch.cuda.Event(enable_timing=True)
            self._copied.record()

    def copies_took_s(self) -> float:
        """Returns the seconds that the copies took, 0 without any. Must be called after `wait`."""
        if self._began is None:
            return self._copied_s - self.began_s
        return 0.0 if self._copied is None else self._began.elapsed_time(self._copied) / 1000

    def stop(self) -> None:
        """Marks the end of the launch."""
        self._ended_s = time.perf_counter()
        if self._ended is not None:
            self._ended.record()

    def wait(self, not_before_s: float) -> float:
        """Waits for the end and returns its time. The step cannot have begun before the previous one ended.

        If the step is over already, its end is computed from its duration.
        """
        if self._began is None or self._ended is None:
            return self._ended_s
        was_over = self._ended.query()
        self._ended.synchronize()
        if not was_over:
            return time.perf_counter()
        took_s: float = self._began.elapsed_time(self._ended) / 1000
        return min(time.perf_counter(), max(self.began_s, not_before_s) + took_s)


class GpuStep:
    """A pending step. Steps must be read in the order of launch; `before` is the previous one.

    `allows_next` is False until the step was read, if it has rows that depend on its tokens: those are known then.
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
    ) -> None:
        self.began_s = timer.began_s
        self.ended_s = timer.began_s
        self.copied_s = 0.0
        self._timer = timer
        self._read_back = read_back
        self._on_host = on_host
        self._sampling = sampling
        self.allows_next = not sampling.processed
        self._before = before
        self._reported = reported
        self._check = check

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
