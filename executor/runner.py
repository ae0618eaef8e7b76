"""Runs plans on the model: packs on the caller's thread, computes on a thread of its own, reads back when asked.

The device thread resolves the tokens that the step before sampled, runs forward and sampling, and never touches a
sequence, so the host can make the next plan meanwhile. What a GPU returns is copied to the host behind the step,
without waiting for it: the thread launches the next step while the device computes this one.
"""

from __future__ import annotations

import queue
import threading
import time

import numpy as np
import torch
from torch import Tensor

from executor.batch import StepBatch, StepPacker
from executor.launch import PendingStep
from executor.limits import SchedulerLimits
from executor.model import PagedModel
from executor.sampling_batch import SamplingBatch, SamplingColumns
from executor.sequence import StepPlan


class LaunchedStep:
    """A step on its way through the device thread."""

    def __init__(self, batch: StepBatch, sampling: SamplingBatch) -> None:
        self.batch = batch
        self.sampling = sampling
        self.began_s = 0.0
        self.ended_s = 0.0
        self._outcome: queue.SimpleQueue[Tensor | BaseException] = queue.SimpleQueue()
        self._copied: torch.cuda.Event | None = None

    def settle(self, sampled_ids: Tensor) -> None:
        """Hands the ids over; from a GPU as a copy that may still be on its way."""
        if sampled_ids.is_cuda:
            on_host = torch.empty(sampled_ids.shape, dtype=sampled_ids.dtype, pin_memory=True)
            on_host.copy_(sampled_ids, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
            sampled_ids = on_host
        self.ended_s = time.perf_counter()
        self._outcome.put(sampled_ids)

    def fail(self, error: BaseException) -> None:
        """Hands the failure over."""
        self.ended_s = time.perf_counter()
        self._outcome.put(error)

    def result(self) -> tuple[int, ...]:
        """See `PendingStep`."""
        outcome = self._outcome.get()
        if isinstance(outcome, BaseException):
            raise outcome
        if self._copied is not None:
            self._copied.synchronize()
            self.ended_s = time.perf_counter()
        return tuple(outcome.tolist())


class ModelRunner:
    """The engine's way to the model."""

    def __init__(self, model: PagedModel, limits: SchedulerLimits, block_size: int) -> None:
        self._model = model
        self._packer = StepPacker(limits.num_seat_rows, -(-limits.context_length // block_size), block_size)
        self._columns = SamplingColumns(limits.num_seat_rows)
        self._launched: queue.SimpleQueue[LaunchedStep | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def launch(self, plan: StepPlan) -> PendingStep:
        """See `StepRunner`."""
        batch = self._packer.pack(plan)
        for sequence in plan.boarded:
            self._columns.board(sequence)
        sampling_rows = np.flatnonzero(plan.samples)
        seats, ends = batch.table_rows.numpy()[sampling_rows], batch.context_lengths.numpy()[sampling_rows]
        step = LaunchedStep(batch, self._columns.select(seats, ends))
        self._launched.put(step)
        return step

    def close(self) -> None:
        """Ends the device thread behind the steps launched, and waits for it."""
        self._launched.put(None)
        self._thread.join()

    def _run(self) -> None:
        sampled_ids: Tensor | None = None
        while (step := self._launched.get()) is not None:
            step.began_s = time.perf_counter()
            try:
                sampled_ids = self._compute(step, sampled_ids)
                step.settle(sampled_ids)
            except BaseException as error:
                sampled_ids = None
                step.fail(error)

    def _compute(self, step: LaunchedStep, sampled_before: Tensor | None) -> Tensor:
        batch = step.batch.to(self._model.device)
        # After a failed step there is nothing to carry: the rows that wanted it belong to sequences that have ended.
        if sampled_before is not None:
            batch.resolve(sampled_before)
        return self._model.step(batch, step.sampling)
