"""Paged attention in plain torch: any device, any dtype, and the reference for tests of the other backends.

KV layout: `[num_slots, num_kv_heads, head_dim]` for keys and for values, a slot being `block * block_size + offset`.
Scales of int8 are `[num_slots, num_kv_heads]`, for keys and for values.
Scores, softmax and sums are float32 whatever the dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.executor.attention.backend import KvShape, LayerKv, Scoring
from inflight.executor.attention.quantized import quantize
from inflight.executor.step.batch import StepBatch

# Query rows of one sequence computed together; bounds the memory of the scores.
TILE_TOKENS = 256


class ReferenceAttention:
    """Gathers the context of each sequence and attends over it. The decodes of a step are one padded batch."""

    name = "reference"
    quantized_kv_dtypes: tuple[torch.dtype, ...] = (torch.int8,)

    def allocate(
        self, shape: KvShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> LayerKv:
        slots = (num_blocks * block_size, shape.num_kv_heads, shape.head_dim)
        keys, values = (torch.zeros(slots, dtype=dtype, device=device) for _ in range(2))
        scales = [torch.zeros(slots[:2], device=device) for _ in range(2)] if dtype == torch.int8 else []
        return LayerKv(shape, keys, values, num_blocks, tuple(scales))

    def write(self, kv: LayerKv, keys: Tensor, values: Tensor, batch: StepBatch) -> None:
        if kv.is_int8:
            key_scales, value_scales = kv.scales
            keys, key_scales[batch.slot_mapping] = quantize(keys)
            values, value_scales[batch.slot_mapping] = quantize(values)
        kv.keys[batch.slot_mapping] = keys
        kv.values[batch.slot_mapping] = values

    def attend(
        self, queries: Tensor, kv: LayerKv, batch: StepBatch, scoring: Scoring, sinks: Tensor | None = None
    ) -> Tensor:
        """Computes the decodes at once, then each chunk in tiles."""
        outputs = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        num_decodes, table_rows = batch.num_decodes, batch.table_rows.long()
        if num_decodes:
            tables, lengths = batch.block_tables[table_rows[:num_decodes]], batch.context_lengths[:num_decodes]
            outputs[:num_decodes] = _attend(
                queries[:num_decodes, None], kv, tables, lengths, batch.block_size, scoring, sinks
            ).squeeze(1)
        starts = batch.query_starts.tolist()
        for i in range(num_decodes, batch.num_sequences):
            for start in range(starts[i], starts[i + 1], TILE_TOKENS):
                end = min(start + TILE_TOKENS, starts[i + 1])
                lengths = batch.context_lengths[i : i + 1] - (starts[i + 1] - end)
                tables = batch.block_tables[table_rows[i : i + 1]]
                outputs[start:end] = _attend(
                    queries[None, start:end], kv, tables, lengths, batch.block_size, scoring, sinks
                ).squeeze(0)
        return outputs


def _attend(
    queries: Tensor,
    kv: LayerKv,
    tables: Tensor,
    lengths: Tensor,
    block_size: int,
    scoring: Scoring,
    sinks: Tensor | None,
) -> Tensor:
    """Computes attention of N sequences with M new tokens each, `queries[N, M, num_heads, head_dim]`.

    The M tokens are the last of the `lengths[N]` tokens of each context.
    """
    num_new, num_kv_heads = queries.shape[1], kv.shape.num_kv_heads
    device = queries.device
    num_slots = int(lengths.max())
    key_positions = torch.arange(num_slots, device=device)  # [L]
    slots = tables[:, key_positions // block_size].long() * block_size + key_positions % block_size  # [N, L]
    positions = lengths[:, None] - num_new + torch.arange(num_new, device=device)  # [N, M]
    distance = positions[:, :, None] - key_positions  # [N, M, L]
    visible = distance >= 0
    if scoring.sliding_window is not None:
        visible &= distance < scoring.sliding_window

    # Slots that no row of the sequence sees may hold anything; zero times NaN would be NaN.
    keys, values = kv.keys[slots].float(), kv.values[slots].float()  # [N, L, num_kv_heads, head_dim]
    if kv.is_int8:
        keys, values = (
            numbers * scales[slots][..., None] for numbers, scales in zip((keys, values), kv.scales, strict=True)
        )
    values = values.masked_fill(~visible.any(1)[:, :, None, None], 0.0)
    grouped = queries.float().unflatten(2, (num_kv_heads, -1))  # [N, M, num_kv_heads, group, head_dim]
    scores = torch.einsum("nmkgd,nlkd->nkgml", grouped, keys) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        of_heads = sinks.float().view(1, num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, of_heads), -1).softmax(-1)[..., :-1]
    return torch.einsum("nkgml,nlkd->nmkgd", weights, values).flatten(2, 3).to(queries.dtype)
