"""Runner of plans on a GPU: it packs a step into one buffer, copies it once, launches, and reads the ids back on
demand.

Launching waits for nothing, so the caller's thread makes the next plan while the device computes. Only a step with rows
whose masks depend on its tokens must be read before the next one is launched. A step is the replay of a CUDA graph
unless it has more tokens than the largest one. Without a GPU the same code computes immediately, as in the tests.

With several ranks, each has a runner. All prepare themselves in the same way, and so exchange in the same order. Then
the leader's launches, and tells the others what it uploads and computes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inflight.common.protocol import MAX_PROMPT_LOGPROB_ROWS
from inflight.executor.attention.backend import LayerKv, StepAttention
from inflight.executor.attention.flashinfer import FlashInfer
from inflight.executor.attention.gpu_host_tier import GpuHostTier
from inflight.executor.device import StepTimer, to_device, to_host
from inflight.executor.engine.runner import DeviceLostError, PendingStep
from inflight.executor.gpu.device_step import DeviceStep, GraphedStep, StepDecoder, StepForm
from inflight.executor.gpu.graph_check import AttentionCheck, GraphCheck
from inflight.executor.gpu.graphs import Bucket, Capture, bucket_of, capture, mixed_buckets
from inflight.executor.gpu.idle import (
    idle_batch,
    idle_processed_sampling,
    idle_reporting_sampling,
    idle_sampling,
    warm_up_lengths,
)
from inflight.executor.gpu.pending import GpuStep, PooledStates, ReadBack
from inflight.executor.gpu.processing import NO_PLACES, UNREAD_TOKENS, Processing, name_excluded, unread_places
from inflight.executor.gpu.step_buffers import StepBuffers
from inflight.executor.gpu.step_layout import StepLayout, Words
from inflight.executor.gpu.table_entries import NO_ENTRIES, TableEntries, TableFollower
from inflight.executor.recurrent.gpu_states import NUM_ROW_WORDS
from inflight.executor.recurrent.host_slots import HostSlots
from inflight.executor.scheduler.limits import SchedulerLimits
from inflight.executor.scheduler.sequence import StepPlan
from inflight.executor.step.batch import StepBatch
from inflight.executor.step.inputs import StepInputs
from inflight.executor.step.logprobs import ROWS_AT_ONCE, StepLogprobs, step_logprobs
from inflight.executor.step.sampling import UNRESTRICTED
from inflight.executor.step.sampling_columns import SamplingBatch

log = logging.getLogger(__name__)

# Steps launched and not read; the engine has two at most.
MAX_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class FollowedStep:
    """What ranks other than the leader compute once it is uploaded. `needs_logits`: the leader needs all logits.
    `changes_ids`: it may choose tokens that the others cannot know."""

    form: StepForm
    num_rows: int
    needs_logits: bool
    changes_ids: bool


class Followers(Protocol):
    """The runners of other ranks, as their leader sees them."""

    def upload(self, words: Words, first: int, count: int) -> None:
        """Lets them call `GpuRunner.receive`."""
        ...

    def launch(self, step: FollowedStep) -> None:
        """Lets them call `GpuRunner.follow`."""
        ...

    def check(self) -> None:
        """Raises `DeviceLostError` if one has failed. What the ranks have computed since has no meaning."""
        ...

    def lost(self, error: Exception) -> DeviceLostError:
        """Returns the first cause of an error, after which the ranks no longer do the same."""
        ...


class GpuRunner:
    """`StepRunner` of a model on a GPU. `prepare` must precede the first launch."""

    def __init__(
        self,
        decoder: StepDecoder,
        kv: Sequence[LayerKv],
        limits: SchedulerLimits,
        block_size: int,
        *,
        uses_graphs: bool = True,
        max_graph_tokens: int = 0,
        capture_graphs: Capture | None = None,
        flashinfer: FlashInfer | None = None,
        followers: Followers | None = None,
    ) -> None:
        """Steps that are not of decodes alone have graphs up to `max_graph_tokens`. `capture_graphs` is CUDA's unless
        it is given; without it a CPU has no graphs. `prepare` decides whether `flashinfer` is used. `followers` are
        those of the leader of several ranks."""
        num_seats, max_blocks = limits.num_seat_rows, -(-limits.context_length // block_size)
        self._device = decoder.device
        self._limits = limits
        self._vocabulary_size = decoder.vocabulary_size
        self._inputs = StepInputs(limits, block_size, self._vocabulary_size)
        has_windows = limits.kv_window is not None
        self._follower = TableFollower(num_seats, max_blocks, first_window_row=num_seats + 1 if has_windows else None)
        most_logits = limits.max_num_yields
        if capture_graphs is None and self._device.type == "cuda":
            capture_graphs = capture
        self._capture = capture_graphs if uses_graphs else None
        most_states = 0 if self._capture is None else min(max_graph_tokens, limits.max_step_tokens)
        most = StepLayout(
            limits.max_step_tokens,
            limits.max_num_sequences,
            most_logits,
            MAX_PROMPT_LOGPROB_ROWS,
            decoder.num_adapter_slots,
            num_state_words=0 if decoder.recurrent_states is None else NUM_ROW_WORDS,
        )
        buffers = StepBuffers(
            self._device, most, num_seats, max_blocks, has_windows=has_windows, states=decoder.recurrent_states
        )
        self._buffers = buffers
        self._step = DeviceStep(decoder, kv, buffers, block_size, most_logits + MAX_PROMPT_LOGPROB_ROWS, most_states)
        self._graphed = GraphedStep(
            self._step, limits.max_num_sequences, mixed_buckets(most_states, limits.max_num_sequences)
        )
        self._processing = Processing(self._device, self._vocabulary_size, limits.context_length, most_logits)
        self._host_tier = GpuHostTier(kv, limits.num_host_blocks) if limits.num_host_blocks else None
        self._host_slots: HostSlots | None = None
        if limits.num_host_slots and decoder.recurrent_states is not None:
            self._host_slots = HostSlots(decoder.recurrent_states.slots(), limits.num_host_slots)
        self._read_back = ReadBack(MAX_IN_FLIGHT, most_logits, self._device)
        self._newest: GpuStep | None = None
        self._flashinfer = flashinfer
        self._followers = followers

    @property
    def uses_flashinfer(self) -> bool:
        """Whether steps without a graph compute chunks by FlashInfer; decided by `prepare`."""
        return self._flashinfer is not None

    def prepare(self) -> None:
        """Compiles the kernels that steps need, compares FlashInfer with them, captures the graphs and checks each. The
        memory that it takes is the most that steps will.

        Raises:
            ModelError: a graph, or FlashInfer where it is required, computes something else than the kernels that it
                replaces.
        """
        limits = self._limits
        sizes = (limits.max_step_tokens, limits.max_num_sequences, limits.context_length)
        decodes = [[1] * bucket.num_sequences for bucket in self._graphed.decode_buckets]
        with torch.inference_mode():
            for lengths in (*warm_up_lengths(*sizes), *decodes):
                layout = self._upload_idle(lengths)
                self._step.compute(layout, len(lengths) if max(lengths) == 1 else 0)
            self._process(self._upload_idle([1]), idle_processed_sampling(self._vocabulary_size))
            reporting = idle_reporting_sampling(min(ROWS_AT_ONCE, limits.max_num_sequences))
            self._report(self._upload_idle([1] * reporting.num_rows, sampling=reporting), reporting)
            if self._flashinfer is not None:
                verdict = AttentionCheck(self._step, limits).run(self._flashinfer)
                log.log(logging.WARNING if verdict.is_warning else logging.INFO, verdict.reason)
                self._flashinfer = self._flashinfer if verdict.is_used else None
            if self._capture is not None:
                graphs = self._graphed.capture(self._capture, self._upload_idle_in)
                GraphCheck(self._step, self._graphed, limits).run(graphs)
                self._graphed.use(graphs)

    def launch(self, plan: StepPlan) -> PendingStep:
        if self._newest is not None and not self._newest.allows_next:
            raise RuntimeError(UNREAD_TOKENS)
        entries = self._follower.follow(plan)
        batch, sampling = self._inputs.pack(plan)
        unread = unread_places(batch, sampling)
        form = self._graphed.form_of(batch, sampling.num_rows)
        timer = StepTimer(self._device)
        # The masks are filled while the device computes.
        constrained = sampling.constrained()
        are_filled = self._inputs.masks.start(constrained) if constrained else None
        try:
            with torch.inference_mode():
                # On the stream of the step: after the previous steps, whose KV it moves, and before the graph's replay.
                if self._host_tier is not None and (plan.swaps_out or plan.swaps_in):
                    self._host_tier.swap(plan.swaps_out, plan.swaps_in)
                    timer.copied()
                if self._host_slots is not None and (plan.state_swaps_out or plan.state_swaps_in):
                    self._host_slots.swap(plan.state_swaps_out, plan.state_swaps_in)
                    timer.copied()
                attention = self._plan_attention(form, batch)
                self._upload(form, batch, sampling, entries)
                self._follower.sent()
                rows = to_device(batch.hidden_rows, self._device) if plan.pooled else None
                hidden = self._graphed.compute(form, attention, rows)
                if needs_logits(sampling):
                    self._step.gather_and_draw(form.layout)
                if are_filled is not None:
                    are_filled()
                self._process(form.layout, sampling, unread)
                reported = self._report(form.layout, sampling)
                on_host = self._read_back.start(self._buffers.sampled_ids[: sampling.num_rows])
                hidden = None if hidden is None else to_host(hidden)
        except Exception as error:
            if self._followers is not None:
                raise self._followers.lost(error) from error
            raise
        timer.stop()
        check = None if self._followers is None else self._followers.check
        pooled = PooledStates(hidden, plan.pooled)
        self._newest = GpuStep(timer, self._read_back, on_host, sampling, self._newest, reported, check, pooled)
        return self._newest

    def receive(self, words: Words, first: int, count: int) -> None:
        """Uploads what the leader has uploaded."""
        with torch.inference_mode():
            self._buffers.receive(words, first, count)

    def follow(self, step: FollowedStep) -> None:
        """Computes the step that was received, together with the leader."""
        with torch.inference_mode():
            self._graphed.compute(step.form)
            if step.needs_logits:
                self._step.gather_and_draw(step.form.layout)
            if step.changes_ids:
                self._step.broadcast_ids(step.num_rows)

    def repeat_decodes(self, num_rows: int) -> None:
        """Computes the decodes of the newest step again and discards their tokens, for measurements."""
        bucket = bucket_of(self._graphed.decode_buckets, num_rows, num_rows)
        assert bucket is not None
        with torch.inference_mode():
            self._graphed.compute(self._graphed.form_in(bucket))

    @property
    def newest_logits(self) -> Tensor:
        """The logits of the step launched last, `[R + Q, vocabulary]` and rows without meaning behind, for
        measurements."""
        return self._step.logits

    def close(self) -> None:
        """Waits for the launched steps."""
        self._inputs.close()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _upload(self, form: StepForm, batch: StepBatch, sampling: SamplingBatch, entries: TableEntries) -> None:
        """Sends a step to the device, and to other ranks."""
        followers = self._followers
        self._buffers.upload(form.layout, batch, sampling, entries, None if followers is None else followers.upload)
        if followers is not None:
            followers.launch(FollowedStep(form, sampling.num_rows, needs_logits(sampling), sampling.excludes))

    def _plan_attention(self, form: StepForm, batch: StepBatch) -> StepAttention | None:
        """Returns the attention of a step in place of the backend's. A graph has the attention that was captured."""
        if self._flashinfer is None or form.bucket is not None:
            return None
        return self._flashinfer.plan(batch)

    def _process(self, layout: StepLayout, sampling: SamplingBatch, unread: Mapping[int, int] = NO_PLACES) -> None:
        """Draws the rows whose logits are changed, and names those that exclude every token. The model's logits are
        left as they are."""
        if sampling.processed:
            rows, input_ids = self._buffers.draw_rows(layout), self._buffers.token_ids(layout)
            self._processing.draw(self._step.logits, rows, sampling, self._buffers.sampled_ids, unread, input_ids)
        if sampling.excludes:
            num_rows = sampling.num_rows
            name_excluded(self._step.logits[:num_rows], self._buffers.sampled_ids[:num_rows])
            self._step.broadcast_ids(num_rows)

    def _report(self, layout: StepLayout, sampling: SamplingBatch) -> StepLogprobs | None:
        """Starts the copy of the log probabilities that rows report."""
        if not sampling.reporting:
            return None
        num_rows, rows = sampling.num_rows, self._buffers.reported_rows(layout, len(sampling.reporting))
        chosen_ids = self._buffers.sampled_ids[:num_rows]
        if layout.num_scored:
            chosen_ids = torch.cat([chosen_ids, self._buffers.target_ids(layout)])
        logits = self._step.logits[: len(chosen_ids)]
        return step_logprobs(logits, chosen_ids, sampling.reporting, rows).start_copy()

    def _upload_idle(
        self, lengths: Sequence[int], layout: StepLayout | None = None, sampling: SamplingBatch | None = None
    ) -> StepLayout:
        """Uploads a dummy step, which writes every token to the spare block. Returns its layout, which is its own
        unless another one is given."""
        if layout is None:
            layout = self._step.layout(sum(lengths), len(lengths), len(lengths))
        batch = idle_batch(lengths, self._buffers.spare_table_row, self._step.block_size)
        self._buffers.upload(layout, batch, sampling or idle_sampling(len(lengths)), NO_ENTRIES)
        return layout

    def _upload_idle_in(self, bucket: Bucket) -> None:
        """Uploads a dummy step in the layout of a bucket: decodes or, in any other, a chunk."""
        lengths = [1] * bucket.num_sequences
        if not bucket.is_decodes:
            lengths = [min(bucket.num_tokens, self._limits.context_length)]
        self._upload_idle(lengths, self._graphed.form_in(bucket, len(lengths)).layout)


def needs_logits(sampling: SamplingBatch) -> bool:
    """Returns whether a step needs all logits of a row, rather than the best token of each part of the vocabulary."""
    if sampling.excludes or sampling.reporting:
        return True
    drawn = sampling.numbers[sampling.numbers["temperature"] > 0]
    return any((drawn[name] != neutral).any() for name, neutral in UNRESTRICTED.items())
