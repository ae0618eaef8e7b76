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
from array import array
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from inflight.common.machine import num_usable_cores
from inflight.executor.attention.host_tier import HostTier
from inflight.executor.device import StepTimer, is_gpu, to_host
from inflight.executor.engine.runner import PendingStep, token_ids_of
from inflight.executor.model.model import PagedModel
from inflight.executor.scheduler.limits import SchedulerLimits
from inflight.executor.scheduler.sequence import NO_LOGPROBS, StepPlan, TokenLogprobs
from inflight.executor.step.batch import StepBatch, pooled_sums
from inflight.executor.step.inputs import StepInputs
from inflight.executor.step.logprobs import StepLogprobs
from inflight.executor.step.sampling_columns import SamplingBatch


class LaunchedStep:
    """A step launched on the device thread, which appends its tokens to the rows that depend on them. Steps must be
    read in the order of launch; `before` is the previous one."""

    allows_next = True

    def __init__(self, plan: StepPlan, batch: StepBatch, sampling: SamplingBatch, before: LaunchedStep | None) -> None:
        self.batch = batch
        self.sampling = sampling
        self.swaps_out = plan.swaps_out
        self.swaps_in = plan.swaps_in
        self.state_swaps_out = plan.state_swaps_out
        self.state_swaps_in = plan.state_swaps_in
        self._pooled_rows = plan.pooled
        self._pooled: tuple[array[float], ...] = ()
        self.began_s = 0.0
        self.ended_s = 0.0
        self.copied_s = 0.0
        self._before = before
        self._reported: StepLogprobs | None = None
        self._outcome: queue.SimpleQueue[tuple[Tensor, StepTimer] | BaseException] = queue.SimpleQueue()

    def settle(self, sampled_ids: Tensor, reported: StepLogprobs | None, timer: StepTimer) -> None:
        """Delivers the sampled ids and what rows report, whose copies to the host began before the timer stopped."""
        self._reported = reported
        self._outcome.put((sampled_ids, timer))

    def pool(self, hidden: Tensor) -> None:
        """Takes the hidden states `[P, hidden_size]`, before `settle`."""
        self._pooled = pooled_sums(hidden, self._pooled_rows)

    def fail(self, error: BaseException) -> None:
        """Delivers the failure."""
        self.ended_s = time.perf_counter()
        self._outcome.put(error)

    def result(self) -> tuple[int | None, ...]:
        outcome = self._outcome.get()
        before, self._before = self._before, None  # otherwise every step would keep the previous one alive
        if isinstance(outcome, BaseException):
            raise outcome
        sampled_ids, timer = outcome
        self.ended_s = timer.wait(0.0 if before is None else before.ended_s)
        self.copied_s = timer.copies_took_s()
        return token_ids_of(sampled_ids.tolist())

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        return NO_LOGPROBS if self._reported is None else self._reported.read()

    def pooled(self) -> tuple[array[float], ...]:
        return self._pooled


class ModelRunner:
    """`StepRunner` of a `PagedModel` whose KV is allocated."""

    def __init__(self, model: PagedModel, limits: SchedulerLimits, block_size: int) -> None:
        self._model = model
        self._host_tier = model.open_host_tier(limits.num_host_blocks) if limits.num_host_blocks else None
        self._host_slots: HostTier | None = None
        if limits.num_host_slots and model.forward.states is not None:
            self._host_slots = model.forward.states.open_host_slots(limits.num_host_slots)
        self._inputs = StepInputs(limits, block_size, model.description.vocabulary_size)
        # Threads of a forward pass wait for each other. Where they occupy every core, a thread beside them would stop
        # all of them as long as it runs, so masks are then computed by as many threads after the pass.
        self._overlaps_masks = is_gpu(model.device) or torch.get_num_threads() < num_usable_cores()
        self._newest: LaunchedStep | None = None
        self._launched: queue.SimpleQueue[LaunchedStep | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def launch(self, plan: StepPlan) -> PendingStep:
        self._newest = step = LaunchedStep(plan, *self._inputs.pack(plan), self._newest)
        self._launched.put(step)
        return step

    def close(self) -> None:
        """Ends the device thread after the launched steps, and waits for it."""
        self._launched.put(None)
        self._thread.join()
        self._inputs.close()

    def _run(self) -> None:
        sampled_ids: Tensor | None = None
        while (step := self._launched.get()) is not None:
            step.began_s = time.perf_counter()
            try:
                timer = StepTimer(self._model.device)
                sampled_ids, reported = self._compute(step, sampled_ids, timer)
                on_host, reported = to_host(sampled_ids), reported and reported.start_copy()
                timer.stop()
                step.settle(on_host, reported, timer)
            except BaseException as error:
                sampled_ids = None
                step.fail(error)

    def _compute(
        self, step: LaunchedStep, sampled_before: Tensor | None, timer: StepTimer
    ) -> tuple[Tensor, StepLogprobs | None]:
        batch, masks = step.batch.to(self._model.device), self._inputs.masks
        # After a failed step there is nothing to carry: the rows that needed it belong to sequences that have ended.
        if sampled_before is not None:
            batch.resolve(sampled_before)
        if batch.hidden_rows.numel():
            assert self._model.pooling is not None
            batch = batch.with_hidden(self._model.pooling.hidden_size)
        if self._host_tier is not None and (step.swaps_out or step.swaps_in):
            self._host_tier.swap(step.swaps_out, step.swaps_in)
            timer.copied()
        if self._host_slots is not None and (step.state_swaps_out or step.state_swaps_in):
            self._host_slots.swap(step.state_swaps_out, step.state_swaps_in)
            timer.copied()
        if constrained := step.sampling.constrained():
            # The masks depend on the previous step's tokens, not on this one's logits.
            fill = masks.start(constrained) if self._overlaps_masks else partial(masks.fill, constrained)
            sampled_ids, reported = self._model.step(batch, step.sampling, fill)
        else:
            sampled_ids, reported = self._model.step(batch, step.sampling)
        if batch.hidden is not None:
            step.pool(batch.hidden)
        if step.sampling.processed:
            step.sampling.append(sampled_ids.tolist())
        return sampled_ids, reported
