"""Runner of plans on a GPU: it packs a step into one buffer, copies it once, launches, and reads the ids back on
demand.

Launching waits for nothing, so the caller's thread makes the next plan while the device computes. Only a step with rows
whose logits are changed must be read before the next one is launched. A step is the replay of a CUDA graph unless it
has more tokens than the largest one. Without a GPU the same code computes immediately, as in the tests.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from common.protocol import MAX_PROMPT_LOGPROB_ROWS
from executor.attention.backend import LayerKv, StepAttention
from executor.attention.flashinfer import FlashInfer
from executor.attention.gpu_host_tier import GpuHostTier
from executor.engine.runner import PendingStep
from executor.gpu.decoder import GpuDecoder
from executor.gpu.device_step import DeviceStep, GraphedStep, StepForm
from executor.gpu.graph_check import AttentionCheck, GraphCheck
from executor.gpu.graphs import Bucket, Capture, bucket_of, capture, mixed_buckets
from executor.gpu.idle import idle_batch, idle_processed_sampling, idle_sampling, warm_up_lengths
from executor.gpu.pending import GpuStep, ReadBack, StepTimer
from executor.gpu.processing import Processing, name_excluded
from executor.gpu.step_buffers import StepBuffers
from executor.gpu.step_layout import StepLayout
from executor.gpu.table_entries import NO_ENTRIES, TableFollower
from executor.logits.grammar import MaskFiller
from executor.scheduler.limits import SchedulerLimits
from executor.scheduler.sequence import StepPlan
from executor.step.batch import StepBatch, StepPacker
from executor.step.logprobs import StepLogprobs, step_logprobs
from executor.step.sampling_columns import SamplingBatch, SamplingColumns

log = logging.getLogger(__name__)

# Steps launched and not read; the engine has two at most.
MAX_IN_FLIGHT = 4


class GpuRunner:
    """`StepRunner` of a model of the common family on a GPU. `prepare` must precede the first launch."""

    def __init__(
        self,
        decoder: GpuDecoder,
        kv: Sequence[LayerKv],
        limits: SchedulerLimits,
        block_size: int,
        *,
        uses_graphs: bool = True,
        max_graph_tokens: int = 0,
        capture_graphs: Capture | None = None,
        flashinfer: FlashInfer | None = None,
    ) -> None:
        """Steps that are not of decodes alone have graphs up to `max_graph_tokens`. `capture_graphs` is CUDA's unless
        it is given; without it a CPU has no graphs. `prepare` decides whether `flashinfer` is used."""
        num_seats, max_blocks = limits.num_seat_rows, -(-limits.context_length // block_size)
        self._device = decoder.head.device
        self._limits = limits
        self._packer = StepPacker(num_seats, max_blocks, block_size)
        self._vocabulary_size = decoder.head.shape[0]
        self._columns = SamplingColumns(num_seats, self._vocabulary_size)
        self._follower = TableFollower(num_seats, max_blocks)
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
        )
        buffers = StepBuffers(self._device, most, num_seats, max_blocks)
        self._buffers = buffers
        self._step = DeviceStep(decoder, kv, buffers, block_size, most_logits + MAX_PROMPT_LOGPROB_ROWS, most_states)
        self._graphed = GraphedStep(
            self._step, limits.max_num_sequences, mixed_buckets(most_states, limits.max_num_sequences)
        )
        self._processing = Processing(self._device, self._vocabulary_size, limits.context_length, most_logits)
        self._masks = MaskFiller(torch.get_num_threads())
        self._host_tier = GpuHostTier(kv, limits.num_host_blocks) if limits.num_host_blocks else None
        self._read_back = ReadBack(MAX_IN_FLIGHT, most_logits, self._device)
        self._newest: GpuStep | None = None
        self._group = decoder.shape.num_heads // decoder.shape.num_kv_heads
        self._flashinfer = flashinfer

    @property
    def uses_flashinfer(self) -> bool:
        """Whether steps without a graph compute chunks by FlashInfer; decided by `prepare`."""
        return self._flashinfer is not None

    def prepare(self) -> None:
        """Compiles the kernels that steps need, compares FlashInfer with them, captures the graphs and checks each.

        Raises:
            ModelError: a graph, or FlashInfer where it is required, computes something else than the kernels that it
                replaces.
        """
        limits = self._limits
        sizes = (limits.max_step_tokens, limits.max_num_sequences, limits.context_length)
        decodes = [[1] * bucket.num_sequences for bucket in self._graphed.decode_buckets]
        with torch.inference_mode():
            for lengths in (*warm_up_lengths(self._group, *sizes), *decodes):
                layout = self._upload_idle(lengths)
                self._step.compute(layout, len(lengths) if max(lengths) == 1 else 0)
            self._process(self._upload_idle([1]), idle_processed_sampling(self._vocabulary_size))
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
            raise RuntimeError("a step was launched before tokens were read that its rows depend on")
        batch = self._packer.pack(plan)
        entries = self._follower.follow(plan)
        sampling = self._columns.select(plan, batch)
        form = self._graphed.form_of(batch, sampling.num_rows)
        layout = form.layout
        timer = StepTimer(self._device)
        # The masks are filled while the device computes.
        constrained = sampling.constrained()
        are_filled = self._masks.start(constrained) if constrained else None
        with torch.inference_mode():
            # On the stream of the step: after the previous steps, whose KV it moves, and before the graph's replay.
            if self._host_tier is not None and (plan.swaps_out or plan.swaps_in):
                self._host_tier.swap(plan.swaps_out, plan.swaps_in)
                timer.copied()
            attention = self._plan_attention(form, batch)
            self._buffers.upload(layout, batch, sampling, entries)
            self._follower.sent()
            self._graphed.compute(form, attention)
            if are_filled is not None:
                are_filled()
            self._process(layout, sampling)
            reported = self._report(layout, sampling)
            on_host = self._read_back.start(self._buffers.sampled_ids[: sampling.num_rows])
        timer.stop()
        self._newest = GpuStep(timer, self._read_back, on_host, sampling, self._newest, reported)
        return self._newest

    def repeat_decodes(self, num_rows: int) -> None:
        """Computes the decodes of the newest step again and discards their tokens, for measurements."""
        bucket = bucket_of(self._graphed.decode_buckets, num_rows, num_rows)
        assert bucket is not None
        with torch.inference_mode():
            self._graphed.compute(self._graphed.form_in(bucket))

    def close(self) -> None:
        """Waits for the launched steps."""
        self._masks.close()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _plan_attention(self, form: StepForm, batch: StepBatch) -> StepAttention | None:
        """Returns the attention of a step in place of the backend's. A graph has the attention that was captured."""
        if self._flashinfer is None or form.bucket is not None:
            return None
        return self._flashinfer.plan(batch)

    def _process(self, layout: StepLayout, sampling: SamplingBatch) -> None:
        """Draws the rows whose logits are changed, and names those that exclude every token. The model's logits are
        left as they are."""
        if sampling.processed:
            rows = self._buffers.draw_rows(layout)
            self._processing.draw(self._step.logits, rows, sampling, self._buffers.sampled_ids)
        if sampling.excludes:
            num_rows = sampling.num_rows
            name_excluded(self._step.logits[:num_rows], self._buffers.sampled_ids[:num_rows])

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

    def _upload_idle(self, lengths: Sequence[int], layout: StepLayout | None = None) -> StepLayout:
        """Uploads a dummy step, which writes every token to the spare block. Returns its layout, which is its own
        unless another one is given."""
        if layout is None:
            layout = StepLayout(sum(lengths), len(lengths), len(lengths), num_adapters=self._step.num_adapters)
        batch = idle_batch(lengths, self._buffers.spare_table_row, self._step.block_size)
        self._buffers.upload(layout, batch, idle_sampling(len(lengths)), NO_ENTRIES)
        return layout

    def _upload_idle_in(self, bucket: Bucket) -> None:
        """Uploads a dummy step in the layout of a bucket: decodes or, in any other, a chunk."""
        lengths = [1] * bucket.num_sequences
        if not bucket.is_decodes:
            lengths = [min(bucket.num_tokens, self._limits.context_length)]
        self._upload_idle(lengths, self._graphed.form_in(bucket, len(lengths)).layout)
