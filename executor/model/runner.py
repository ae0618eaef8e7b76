"""Runner of a model on a device thread: it packs plans on the caller's thread, computes on its own, and reads back on
demand.

The device thread resolves the tokens that the previous step sampled, runs forward pass and sampling, and never touches
a sequence, so the host can make the next plan meanwhile. On a GPU the results are copied to the host behind the step
without waiting, and the thread launches the next step while the device computes this one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from inflight.common.machine import num_usable_cores
from inflight.executor.attention.host_tier import HostTier
from inflight.executor.engine.runner import PendingStep, token_ids_of
from inflight.executor.logits.grammar import MaskFiller
from inflight.executor.model.model import PagedModel
from inflight.executor.scheduler.limits import SchedulerLimits
from inflight.executor.scheduler.sequence import NO_LOGPROBS, StepPlan, TokenLogprobs
from inflight.executor.step.batch import StepBatch, StepPacker
from inflight.executor.step.logprobs import StepLogprobs
from inflight.executor.step.sampling_columns import SamplingBatch, SamplingColumns


class LaunchedStep:
    """A step launched on the device thread, which appends its tokens to the rows that depend on them."""

    allows_next = True

    def __init__(self, plan: StepPlan, batch: StepBatch, sampling: SamplingBatch) -> None:
        self.batch = batch
        self.sampling = sampling
        self.swaps_out = plan.swaps_out
        self.swaps_in = plan.swaps_in
        self.began_s = 0.0
        self.ended_s = 0.0
        self.copied_s = 0.0
        self.marks: GpuMarks | None = None
        self.reported: StepLogprobs | None = None
        self._outcome: queue.SimpleQueue[Tensor | BaseException] = queue.SimpleQueue()

    def settle(self, outcome: Tensor | BaseException) -> None:
        """Delivers the sampled ids, on the host, or the failure."""
        self._outcome.put(outcome)

    def result(self) -> tuple[int | None, ...]:
        outcome = self._outcome.get()
        if isinstance(outcome, BaseException):
            raise outcome
        if self.marks is not None:
            self.began_s, self.ended_s = self.marks.wait()
            self.copied_s = self.marks.copied_s()
        return token_ids_of(outcome.tolist())

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        return NO_LOGPROBS if self.reported is None else self.reported.read()


class GpuMarks:
    """Begin and end of a step on a GPU stream, converted to the host's clock.

    The GPU reports the time between two marks. A step is placed after the end of the previous one if that still ran at
    its launch, else at its launch.
    """

    def __init__(self, before: GpuMarks | None) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True, blocking=True)
        self._copied: torch.cuda.Event | None = None
        self._before = None if before is None or before._end.query() else before
        self._launched_s = time.perf_counter()
        self._ended_s = 0.0
        self._begin.record()

    def copied(self) -> None:
        """Marks the end of the copies between device and host memory."""
        self._copied = torch.cuda.Event(enable_timing=True)
        self._copied.record()

    def copied_s(self) -> float:
        """Returns the seconds that the copies took, 0 without any. Must be called after `wait`."""
        return 0.0 if self._copied is None else self._begin.elapsed_time(self._copied) / 1000

    def end(self) -> None:
        """Marks the end, after everything of the step is on the stream."""
        self._end.record()

    def wait(self) -> tuple[float, float]:
        """Waits for the end and returns the host's times. Steps must be waited for in order."""
        self._end.synchronize()
        before, self._before = self._before, None
        began_s = self._launched_s
        if before is not None:
            began_s = before._ended_s + before._end.elapsed_time(self._begin) / 1000
        self._ended_s = began_s + self._begin.elapsed_time(self._end) / 1000
        return began_s, self._ended_s


class ModelRunner:
    """`StepRunner` of a `PagedModel` whose KV is allocated."""

    def __init__(self, model: PagedModel, limits: SchedulerLimits, block_size: int) -> None:
        self._model = model
        self._host_tier = model.open_host_tier(limits.num_host_blocks) if limits.num_host_blocks else None
        self._packer = StepPacker(
            limits.num_seat_rows,
            -(-limits.context_length // block_size),
            block_size,
            has_windows=limits.kv_window is not None,
        )
        self._columns = SamplingColumns(limits.num_seat_rows, model.description.vocabulary_size)
        self._masks = MaskFiller(torch.get_num_threads())
        # Threads of a forward pass wait for each other. Where they occupy every core, a thread beside them would stop
        # all of them as long as it runs, so masks are then computed by as many threads after the pass.
        self._overlaps_masks = model.device.type == "cuda" or torch.get_num_threads() < num_usable_cores()
        self._launched: queue.SimpleQueue[LaunchedStep | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def launch(self, plan: StepPlan) -> PendingStep:
        batch = self._packer.pack(plan)
        step = LaunchedStep(plan, batch, self._columns.select(plan, batch))
        self._launched.put(step)
        return step

    def close(self) -> None:
        """Ends the device thread after the launched steps, and waits for it."""
        self._launched.put(None)
        self._thread.join()
        self._masks.close()

    def _run(self) -> None:
        sampled_ids: Tensor | None = None
        marks: GpuMarks | None = None
        while (step := self._launched.get()) is not None:
            try:
                if self._model.device.type == "cuda":
                    sampled_ids, marks = self._launch_on_gpu(step, sampled_ids, marks)
                else:
                    sampled_ids = self._run_here(step, sampled_ids)
            except BaseException as error:
                sampled_ids, marks = None, None
                step.ended_s = time.perf_counter()
                step.settle(error)

    def _run_here(self, step: LaunchedStep, sampled_before: Tensor | None) -> Tensor:
        step.began_s = time.perf_counter()
        sampled_ids = self._compute(step, sampled_before)
        step.ended_s = time.perf_counter()
        step.settle(sampled_ids)
        return sampled_ids

    def _launch_on_gpu(
        self, step: LaunchedStep, sampled_before: Tensor | None, marks_before: GpuMarks | None
    ) -> tuple[Tensor, GpuMarks]:
        """Puts the step on the stream, and behind it the copy of its tokens to the host."""
        step.marks = marks = GpuMarks(marks_before)
        sampled_ids = self._compute(step, sampled_before)
        on_host = torch.empty(sampled_ids.shape, dtype=sampled_ids.dtype, pin_memory=True)
        on_host.copy_(sampled_ids, non_blocking=True)
        if step.reported is not None:
            step.reported = step.reported.start_copy()
        marks.end()
        step.settle(on_host)
        return sampled_ids, marks

    def _swap(self, host_tier: HostTier, step: LaunchedStep) -> None:
        began_s = time.perf_counter()
        host_tier.swap(step.swaps_out, step.swaps_in)
        if step.marks is not None:
            step.marks.copied()
        else:
            step.copied_s = time.perf_counter() - began_s

    def _compute(self, step: LaunchedStep, sampled_before: Tensor | None) -> Tensor:
        batch = step.batch.to(self._model.device)
        # After a failed step there is nothing to carry: the rows that needed it belong to sequences that have ended.
        if sampled_before is not None:
            batch.resolve(sampled_before)
        if self._host_tier is not None and (step.swaps_out or step.swaps_in):
            self._swap(self._host_tier, step)
        if constrained := step.sampling.constrained():
            # The masks depend on the previous step's tokens, not on this one's logits.
            fill = self._masks.start(constrained) if self._overlaps_masks else partial(self._masks.fill, constrained)
            sampled_ids, step.reported = self._model.step(batch, step.sampling, fill)
        else:
            sampled_ids, step.reported = self._model.step(batch, step.sampling)
        if step.sampling.processed:
            step.sampling.append(sampled_ids.tolist())
        return sampled_ids
