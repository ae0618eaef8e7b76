"""A step on the device, from the inputs in its buffers to the next tokens, by CUDA graphs where they fit.

`DeviceStep` launches kernels. `GraphedStep` says in which layout a step is uploaded, and replays a graph if one has
that layout.

With several ranks, each computes its own part of the logits, and draws from them together with the others. Only if a
step needs all logits they are gathered, on all ranks, behind the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from inflight.executor.attention.backend import LayerKv, StepAttention
from inflight.executor.engine.runner import NO_TOKEN
from inflight.executor.gpu.decoder import GpuDecoder, Ranks
from inflight.executor.gpu.graphs import Bucket, Capture, Graph, bucket_of, decode_buckets
from inflight.executor.gpu.row_groups import RowGroups
from inflight.executor.gpu.sampling import DrawRows, draw
from inflight.executor.gpu.step_buffers import StepBuffers
from inflight.executor.gpu.step_layout import StepLayout
from inflight.executor.recurrent.gpu_states import NUM_ROW_WORDS, GpuStates
from inflight.executor.step.batch import StepBatch


class StepDecoder(Protocol):
    """What computes the network of a step. One without graphs and ranks need not be a `GpuDecoder`."""

    ranks: Ranks | None

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """That of states and logits."""
        ...

    @property
    def hidden_size(self) -> int:
        """Numbers of a state, which the output layer reads."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Logits of a position."""
        ...

    @property
    def num_adapter_slots(self) -> int:
        """Slots for adapters."""
        ...

    @property
    def recurrent_states(self) -> GpuStates | None:
        """The memory of recurrent layers; None if there are none."""
        ...

    def forward(
        self,
        batch: StepBatch,
        kv: Sequence[LayerKv],
        logits: Tensor | None = None,
        groups: RowGroups | None = None,
        attention: StepAttention | None = None,
    ) -> Tensor:
        """See `GpuDecoder.forward`."""
        ...


class DeviceStep:
    """Model, KV and buffers. After a step, `logits[:R + Q]` and `buffers.sampled_ids[:R]` are the step's. With several
    ranks, the logits of others are -inf until they are gathered."""

    def __init__(
        self,
        decoder: StepDecoder,
        kv: Sequence[LayerKv],
        buffers: StepBuffers,
        block_size: int,
        max_num_logits: int,
        max_num_states: int = 0,
    ) -> None:
        """`compute_states` computes at most `max_num_states` tokens."""
        self.buffers = buffers
        self.kv = kv
        self.block_size = block_size
        self._num_adapters = decoder.num_adapter_slots
        self._num_state_words = 0 if decoder.recurrent_states is None else NUM_ROW_WORDS
        self.logits = _empty_rows(max_num_logits, decoder.vocabulary_size, decoder)
        self._states = _empty_rows(max_num_states, decoder.hidden_size, decoder)
        self._decoder = decoder
        # Whether there may be logits of other ranks.
        self._has_others = True

    @property
    def recurrent_states(self) -> GpuStates | None:
        """The memory of recurrent layers; None if there are none."""
        return self._decoder.recurrent_states

    def layout(
        self, num_tokens: int, num_sequences: int, num_logits: int, num_scored: int = 0, *, is_padded: bool = False
    ) -> StepLayout:
        """Returns the layout of steps of these sizes of this model."""
        sizes = (num_tokens, num_sequences, num_logits, num_scored)
        return StepLayout(*sizes, self._num_adapters, is_padded, self._num_state_words)

    def compute(
        self,
        layout: StepLayout,
        num_decodes: int,
        attention: StepAttention | None = None,
        hidden_rows: Tensor | None = None,
    ) -> Tensor | None:
        """Fills in carried tokens, computes the model, and draws the next tokens. `attention` takes the place of the
        backend's. Returns the hidden states `[P, hidden]` float32 of `hidden_rows[P]`, if they are given."""
        self.drop_others()
        self.buffers.resolve(layout)
        batch = self.buffers.batch(layout, num_decodes, self.block_size)
        if hidden_rows is not None:
            batch = replace(batch, hidden_rows=hidden_rows).with_hidden(self._decoder.hidden_size)
        logits = self.logits[: layout.num_logits + layout.num_scored]
        self._decoder.forward(batch, self.kv, logits, self.buffers.row_groups(layout), attention)
        self._draw(layout)
        return batch.hidden

    def compute_states(self, layout: StepLayout) -> None:
        """Computes the part of a step that depends on the numbers of tokens and sequences of its layout alone. Which
        sequences are decodes is found out on the device."""
        self.drop_others()
        self.buffers.resolve(layout)
        batch = self.buffers.batch(layout, layout.num_sequences, self.block_size)
        states = self._fused.states(batch, self.kv, self.buffers.row_groups(layout))
        self._states[: layout.num_tokens] = states

    def hidden(self, rows: Tensor) -> Tensor:
        """Returns the hidden states `[P, hidden]` float32 of some tokens, after `compute_states`."""
        return self._states[rows].float()

    def finish(self, layout: StepLayout) -> None:
        """Computes the logits and draws the next tokens, after `compute_states`."""
        num_logits = layout.num_logits + layout.num_scored
        if num_logits:
            states = self._states[self.buffers.logit_rows(layout)]
            self._fused.logits(states, self.logits[:num_logits])
            self._draw(layout)

    def drop_others(self) -> None:
        """Makes the logits of other ranks -inf."""
        if self._decoder.ranks is not None and self._has_others:
            own = self._fused.own_ids
            self.logits[:, : own.start] = float("-inf")
            self.logits[:, own.stop :] = float("-inf")
            self._has_others = False

    def gather_logits(self, num_rows: int) -> None:
        """Fills in the first rows of logits of other ranks. All ranks must call it."""
        if self._decoder.ranks is not None:
            self._fused.gather_logits(self.logits[:num_rows])
            self._has_others = True

    def gather_and_draw(self, layout: StepLayout) -> None:
        """Gathers the logits of a step that needs all of them, and draws its tokens again."""
        if self._decoder.ranks is not None:
            self.gather_logits(layout.num_logits + layout.num_scored)
            draw(*self._drawn(layout))

    def overwrite_result(self) -> None:
        """Overwrites logits and tokens, so that a step that writes none is noticed."""
        self.logits.fill_(float("nan"))
        self.buffers.sampled_ids.fill_(NO_TOKEN)
        self._has_others = True

    def broadcast_ids(self, num_rows: int) -> None:
        """Gives all ranks the tokens of rank 0."""
        if self._decoder.ranks is not None:
            self._decoder.ranks.broadcast(self.buffers.sampled_ids[:num_rows])

    @property
    def _fused(self) -> GpuDecoder:
        """The decoder, where only this kind is possible: for graphs of chunks, and with ranks."""
        assert isinstance(self._decoder, GpuDecoder)
        return self._decoder

    def _draw(self, layout: StepLayout) -> None:
        if layout.num_logits:
            ranks = self._decoder.ranks
            draw(*self._drawn(layout), None if ranks is None else ranks.all_gather)

    def _drawn(self, layout: StepLayout) -> tuple[Tensor, DrawRows, Tensor]:
        num_rows = layout.num_logits
        return self.logits[:num_rows], self.buffers.draw_rows(layout), self.buffers.sampled_ids[:num_rows]


@dataclass(frozen=True, slots=True)
class StepForm:
    """The layout of a step and, if it is that of a captured step, its bucket."""

    layout: StepLayout
    num_decodes: int
    bucket: Bucket | None = None


class GraphedStep:
    """Computes steps by graphs where they are captured, and else by `DeviceStep`. `mixed` are the buckets of steps that
    are not of decodes alone."""

    def __init__(self, step: DeviceStep, max_num_sequences: int, mixed: Sequence[Bucket]) -> None:
        self._step = step
        self._decodes = decode_buckets(max_num_sequences)
        self._mixed = mixed
        self._graphs: Mapping[Bucket, Graph] = {}

    @property
    def decode_buckets(self) -> Sequence[Bucket]:
        """The buckets of decodes, in ascending order."""
        return self._decodes

    def form_of(self, batch: StepBatch, num_yields: int) -> StepForm:
        """Returns the form in which a step of `num_yields` sampled tokens is uploaded and computed."""
        num_tokens, num_sequences, num_scored = batch.num_tokens, batch.num_sequences, batch.target_ids.shape[0]
        is_decodes = num_tokens == num_sequences == num_yields
        bucket = bucket_of(self._decodes if is_decodes else self._mixed, num_tokens, num_sequences)
        if bucket is not None:
            return self.form_in(bucket, num_yields, num_scored)
        return StepForm(self._step.layout(num_tokens, num_sequences, num_yields, num_scored), batch.num_decodes)

    def form_in(self, bucket: Bucket, num_yields: int = 0, num_scored: int = 0) -> StepForm:
        """Returns the form of a step in a bucket. In one of decodes every row yields a token."""
        if bucket.is_decodes:
            layout = self._step.layout(*[bucket.num_sequences] * 3)
        else:
            sizes = (bucket.num_tokens, bucket.num_sequences, num_yields, num_scored)
            layout = self._step.layout(*sizes, is_padded=True)
        return StepForm(layout, bucket.num_sequences, bucket)

    def compute(
        self, form: StepForm, attention: StepAttention | None = None, hidden_rows: Tensor | None = None
    ) -> Tensor | None:
        """Computes the step that was uploaded last, in this form. A step in a bucket has the backend's attention.
        Returns the hidden states of `hidden_rows` as `DeviceStep.compute` does; a step with such is not of decodes
        alone."""
        graph = None if form.bucket is None else self._graphs.get(form.bucket)
        if graph is None:
            return self._step.compute(form.layout, form.num_decodes, attention, hidden_rows)
        self.replay(graph, form)
        return None if hidden_rows is None else self._step.hidden(hidden_rows)

    def replay(self, graph: Graph, form: StepForm) -> None:
        """Computes a step of a captured form."""
        self._step.drop_others()
        graph.replay()
        if form.layout.is_padded:
            self._step.finish(form.layout)

    def capture(self, capture: Capture, fill: Callable[[Bucket], None]) -> Mapping[Bucket, Graph]:
        """Captures every bucket. The graphs are used once they are given to `use`."""
        return capture(fill, self._compute_captured, (*self._decodes, *self._mixed))

    def use(self, graphs: Mapping[Bucket, Graph]) -> None:
        """Replays these graphs from now on."""
        self._graphs = dict(graphs)

    def _compute_captured(self, bucket: Bucket) -> None:
        form = self.form_in(bucket)
        if form.layout.is_padded:
            self._step.compute_states(form.layout)
        else:
            self._step.compute(form.layout, form.num_decodes)


def _empty_rows(num_rows: int, size: int, decoder: StepDecoder) -> Tensor:
    """Returns rows that are not initialised, of the type and on the device of a decoder."""
    return torch.empty((num_rows, size), dtype=decoder.dtype, device=decoder.device)
