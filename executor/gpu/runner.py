"""Runner of plans on a GPU: it packs a step into one buffer, copies it once, launches, and reads the ids back on
demand.

Launching waits for nothing, so the caller's thread makes the next plan while the device computes. Only a step with rows
whose logits are changed must be read before the next one is launched. A step of decodes
alone is the replay of a CUDA graph; a step with prefill chunks is launched kernel by kernel. Without a GPU the same
code computes immediately, as in the tests.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from common.model_source import ModelError
from common.protocol import MAX_PROMPT_LOGPROB_ROWS
from executor.attention.backend import LayerKv
from executor.attention.gpu_host_tier import GpuHostTier
from executor.engine.runner import NO_TOKEN, PendingStep
from executor.gpu.decoder import GpuDecoder
from executor.gpu.graph_check import StepResult, TrialRows, difference
from executor.gpu.graphs import Capture, Graph, bucket_of, capture, decode_buckets
from executor.gpu.idle import idle_batch, idle_processed_sampling, idle_sampling, warm_up_lengths
from executor.gpu.pending import GpuStep, ReadBack, StepTimer
from executor.gpu.processing import Processing, name_excluded
from executor.gpu.sampling import draw
from executor.gpu.step_buffers import StepBuffers
from executor.gpu.step_layout import StepLayout
from executor.gpu.table_entries import NO_ENTRIES, TableEntries, TableFollower
from executor.logits.grammar import MaskFiller
from executor.scheduler.limits import SchedulerLimits
from executor.scheduler.sequence import StepPlan
from executor.step.batch import StepBatch, StepPacker, pack
from executor.step.logprobs import StepLogprobs, step_logprobs
from executor.step.sampling_columns import SamplingBatch, SamplingColumns


class DeviceStep:
    """Model, KV and buffers. After `compute`, `logits[:R + Q]` and `buffers.sampled_ids[:R]` are the step's."""

    def __init__(
        self, decoder: GpuDecoder, kv: Sequence[LayerKv], buffers: StepBuffers, block_size: int, max_num_logits: int
    ) -> None:
        self.buffers = buffers
        vocabulary_size = decoder.head.shape[0]
        self.logits = torch.empty(
            (max_num_logits, vocabulary_size), dtype=decoder.head.dtype, device=decoder.head.device
        )
        self._decoder = decoder
        self._kv = kv
        self._block_size = block_size

    def compute(self, layout: StepLayout, num_decodes: int) -> None:
        """Fills in carried tokens, computes the model, and draws the next tokens."""
        self.buffers.resolve(layout)
        batch = self.buffers.batch(layout, num_decodes, self._block_size)
        num_rows = layout.num_logits
        groups = self.buffers.row_groups(layout)
        logits = self._decoder.forward(batch, self._kv, self.logits[: num_rows + layout.num_scored], groups)
        if num_rows:
            draw(logits[:num_rows], self.buffers.draw_rows(layout), self.buffers.sampled_ids[:num_rows])


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
        capture_graphs: Capture | None = None,
    ) -> None:
        """`capture_graphs` is CUDA's unless it is given; without it a CPU has no graphs."""
        num_seats, self._max_blocks = limits.num_seat_rows, -(-limits.context_length // block_size)
        self._device = decoder.head.device
        self._limits = limits
        self._packer = StepPacker(num_seats, self._max_blocks, block_size)
        self._vocabulary_size = decoder.head.shape[0]
        self._columns = SamplingColumns(num_seats, self._vocabulary_size)
        self._follower = TableFollower(num_seats, self._max_blocks)
        most_logits = limits.max_num_yields
        self._num_adapters = decoder.num_adapter_slots
        most = StepLayout(
            limits.max_step_tokens,
            limits.max_num_sequences,
            most_logits,
            MAX_PROMPT_LOGPROB_ROWS,
            self._num_adapters,
        )
        buffers = StepBuffers(self._device, most, num_seats, self._max_blocks)
        self._buffers = buffers
        self._step = DeviceStep(decoder, kv, buffers, block_size, most_logits + MAX_PROMPT_LOGPROB_ROWS)
        self._processing = Processing(self._device, self._vocabulary_size, limits.context_length, most_logits)
        self._masks = MaskFiller(torch.get_num_threads())
        self._host_tier = GpuHostTier(kv, limits.num_host_blocks) if limits.num_host_blocks else None
        self._read_back = ReadBack(MAX_IN_FLIGHT, most_logits, self._device)
        self._kv = kv
        self._buckets = decode_buckets(limits.max_num_sequences)
        if capture_graphs is None and self._device.type == "cuda":
            capture_graphs = capture
        self._capture = capture_graphs if uses_graphs else None
        self._graphs: dict[int, Graph] = {}
        self._newest: GpuStep | None = None
        self._block_size = block_size
        self._group = decoder.shape.num_heads // decoder.shape.num_kv_heads

    def prepare(self) -> None:
        """Compiles the kernels that steps need, captures the graphs and checks each.

        Raises:
            ModelError: a graph computes something else than the kernels that it replaces.
        """
        limits = self._limits
        sizes = (limits.max_step_tokens, limits.max_num_sequences, limits.context_length)
        with torch.inference_mode():
            for lengths in (*warm_up_lengths(self._group, *sizes), *([1] * bucket for bucket in self._buckets)):
                layout = self._upload_idle(lengths)
                self._step.compute(layout, len(lengths) if max(lengths) == 1 else 0)
            self._process(self._upload_idle([1]), idle_processed_sampling(self._vocabulary_size))
            if self._capture is not None:
                graphs = self._capture(self._upload_idle_decodes, self._compute_decodes, self._buckets)
                self._check_graphs(graphs)
                self._graphs = dict(graphs)

    def launch(self, plan: StepPlan) -> PendingStep:
        if self._newest is not None and not self._newest.allows_next:
            raise RuntimeError("a step was launched before tokens were read that its rows depend on")
        batch = self._packer.pack(plan)
        entries = self._follower.follow(plan)
        sampling = self._columns.select(plan, batch)
        layout, bucket = self._layout_of(batch, sampling)
        timer = StepTimer(self._device)
        # The masks are filled while the device computes.
        constrained = sampling.constrained()
        are_filled = self._masks.start(constrained) if constrained else None
        with torch.inference_mode():
            # On the stream of the step: after the previous steps, whose KV it moves, and before the graph's replay.
            if self._host_tier is not None and (plan.swaps_out or plan.swaps_in):
                self._host_tier.swap(plan.swaps_out, plan.swaps_in)
                timer.copied()
            self._buffers.upload(layout, batch, sampling, entries)
            self._follower.sent()
            self._compute(layout, bucket, batch.num_decodes)
            if are_filled is not None:
                are_filled()
            self._process(layout, sampling)
            reported = self._report(layout, sampling)
            on_host = self._read_back.start(self._buffers.sampled_ids[: sampling.num_rows])
        timer.stop()
        self._newest = GpuStep(timer, self._read_back, on_host, sampling, self._newest, reported)
        return self._newest

    def repeat_decodes(self, bucket: int) -> None:
        """Computes the decodes of the newest step again and discards their tokens, for measurements."""
        with torch.inference_mode():
            self._compute(self._layout_of_decodes(bucket), bucket, bucket)

    def close(self) -> None:
        """Waits for the launched steps."""
        self._masks.close()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _layout_of(self, batch: StepBatch, sampling: SamplingBatch) -> tuple[StepLayout, int | None]:
        """Returns the layout of a step, and its bucket if it has only decodes."""
        if batch.num_tokens == batch.num_sequences == sampling.num_rows:
            bucket = bucket_of(self._buckets, batch.num_sequences)
            if bucket is not None:
                return self._layout_of_decodes(bucket), bucket
        num_scored = len(batch.target_ids)
        layout = StepLayout(batch.num_tokens, batch.num_sequences, sampling.num_rows, num_scored, self._num_adapters)
        return layout, None

    def _layout_of_decodes(self, bucket: int) -> StepLayout:
        return StepLayout.of_decodes(bucket, self._num_adapters)

    def _compute(self, layout: StepLayout, bucket: int | None, num_decodes: int) -> None:
        graph = None if bucket is None else self._graphs.get(bucket)
        if graph is not None:
            graph.replay()
        else:
            self._step.compute(layout, num_decodes if bucket is None else bucket)

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

    def _upload_idle_decodes(self, bucket: int) -> None:
        self._upload_idle([1] * bucket)

    def _compute_decodes(self, bucket: int) -> None:
        """Computes the decodes that were uploaded last, in the layout of the bucket."""
        self._step.compute(self._layout_of_decodes(bucket), bucket)

    def _check_graphs(self, graphs: Mapping[int, Graph]) -> None:
        """Compares a replay of each graph with its kernels. No block of the pool holds anything yet that is needed."""
        limits = self._limits
        sizes = (limits.max_num_sequences, self._kv[0].num_blocks - 1, self._block_size, limits.context_length)
        rows = TrialRows.of(*sizes, self._vocabulary_size)
        entries = rows.entries(self._max_blocks)
        for seat, plan in rows.prefills(limits.max_num_tokens):
            layout = StepLayout(sum(plan.lengths), plan.num_rows, 0, num_adapters=self._num_adapters)
            self._upload_trial(layout, plan, seat, entries)
            self._step.compute(layout, 0)
        for bucket, graph in graphs.items():
            layout, plan = self._layout_of_decodes(bucket), rows.decodes(bucket)
            self._upload_trial(layout, plan, 0, entries)
            self._step.compute(layout, bucket)
            launched = self._take_result(plan.num_rows)
            graph.replay()
            if reason := difference(launched, self._take_result(plan.num_rows)):
                raise ModelError(
                    f"the CUDA graph of {bucket} decodes does not compute what its kernels compute: {reason}; "
                    "start with enable_cuda_graphs=false, and report this"
                )

    def _upload_trial(self, layout: StepLayout, plan: StepPlan, first_seat: int, entries: TableEntries) -> None:
        batch = pack(plan, self._block_size)
        batch = replace(batch, table_rows=batch.table_rows + first_seat)
        self._buffers.upload(layout, batch, idle_sampling(len(batch.logit_rows)), entries)

    def _take_result(self, num_rows: int) -> StepResult:
        """Copies logits and tokens of the newest step, and overwrites them, so that a step that writes none is
        noticed."""
        logits, token_ids = self._step.logits, self._buffers.sampled_ids
        result = StepResult(logits[:num_rows].clone(), token_ids[:num_rows].clone())
        logits.fill_(float("nan"))
        token_ids.fill_(NO_TOKEN)
        return result

    def _upload_idle(self, lengths: Sequence[int]) -> StepLayout:
        """Uploads a dummy step, which writes every token to the spare block."""
        layout = StepLayout(sum(lengths), len(lengths), len(lengths), num_adapters=self._num_adapters)
        batch = idle_batch(lengths, self._buffers.spare_table_row, self._block_size)
        self._buffers.upload(layout, batch, idle_sampling(len(lengths)), NO_ENTRIES)
        return layout
