"""Paged attention by the Triton kernels: any CUDA GPU since sm_80, or Triton's interpreter on a CPU.

KV layout: `[num_blocks, num_kv_heads, block_size, head_dim]` for keys and for values, so that a program reads
contiguous memory of a block. FP8 has scales `[num_blocks, num_kv_heads, block_size]` beside them. Launches depend on
sizes alone, so they can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from inflight.executor.attention.backend import KvShape, LayerKv, Scoring
from inflight.executor.device import is_gpu
from inflight.executor.kernels.attention import attend_decodes_kernel, attend_kernel, combine_kernel
from inflight.executor.kernels.rope_write import write_kernel
from inflight.executor.kernels.tiling import (
    AttentionWork,
    Tiling,
    chunk_tiling,
    decode_tiling,
    num_decode_programs,
    num_row_tiles,
    padded_dim,
    power_of_two,
)
from inflight.executor.step.batch import StepBatch

# A program combines the splits of one head: few numbers, and many programs at a time hide their latency.
COMBINE_WARPS = 1
# Contexts of which a program of decodes adds up the spans at once.
SEQUENCES_AT_ONCE = 256

TilingRule = Callable[[AttentionWork], Tiling]


class TritonAttention:
    """Launches the kernels: first the decodes of a step, then its chunks."""

    name = "triton"
    quantized_kv_dtypes: tuple[torch.dtype, ...] = (torch.float8_e4m3fn,)

    def __init__(self, tile_decodes: TilingRule = decode_tiling, tile_chunks: TilingRule = chunk_tiling) -> None:
        """Other rules than the default ones are for measurements."""
        self._tile_decodes, self._tile_chunks = tile_decodes, tile_chunks

    def allocate(
        self, shape: KvShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> LayerKv:
        sizes = (num_blocks, shape.num_kv_heads, block_size, shape.head_dim)
        keys, values = (torch.zeros(sizes, dtype=dtype, device=device) for _ in range(2))
        has_scales = dtype == torch.float8_e4m3fn
        scales = [torch.zeros(sizes[:3], device=device) for _ in range(2)] if has_scales else []
        return LayerKv(shape, keys, values, num_blocks, tuple(scales))

    def write(self, kv: LayerKv, keys: Tensor, values: Tensor, batch: StepBatch) -> None:
        keys, values = with_contiguous_heads(keys), with_contiguous_heads(values)
        write_kernel[(keys.shape[0],)](
            keys,
            values,
            batch.slot_mapping,
            *(kv.keys, kv.values, *scales_of(kv)),
            *(keys.stride(0), keys.stride(1), values.stride(0), values.stride(1)),
            *kv.keys.stride()[:3],
            NUM_KV_HEADS=kv.shape.num_kv_heads,
            HEAD_DIM=kv.shape.head_dim,
            PADDED_HEADS=power_of_two(kv.shape.num_kv_heads),
            PADDED_DIM=power_of_two(kv.shape.head_dim),
            BLOCK_SIZE=kv.keys.shape[2],
        )

    def attend(
        self, queries: Tensor, kv: LayerKv, batch: StepBatch, scoring: Scoring, sinks: Tensor | None = None
    ) -> Tensor:
        # Padding tokens belong to no sequence, so that no program writes their outputs.
        make = torch.zeros if batch.is_padded else torch.empty
        outputs = make(queries.shape, dtype=queries.dtype, device=queries.device)
        self.attend_decodes(queries, kv, batch, scoring, outputs, sinks)
        # With padding every sequence may be a decode or not.
        first = 0 if batch.is_padded else batch.num_decodes
        if batch.num_sequences > first:
            call = _Call(with_contiguous_heads(queries), outputs, kv, batch, scoring, sinks)
            work = call.work(batch.num_tokens - first, batch.num_sequences - first)
            call.launch_chunks(self._tile_chunks(work), work, first)
        return outputs

    def attend_decodes(
        self,
        queries: Tensor,
        kv: LayerKv,
        batch: StepBatch,
        scoring: Scoring,
        outputs: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """Computes the decodes of a step alone, into their rows of `outputs`."""
        num_decodes = batch.num_decodes
        if num_decodes:
            call = _Call(with_contiguous_heads(queries), outputs, kv, batch, scoring, sinks)
            work = call.work(num_decodes, num_decodes)
            call.launch_decodes(self._tile_decodes(work), work)


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """The tensors of one call, shared by its one or two launches."""

    queries: Tensor
    outputs: Tensor
    kv: LayerKv
    batch: StepBatch
    scoring: Scoring
    sinks: Tensor | None

    def work(self, num_tokens: int, num_sequences: int) -> AttentionWork:
        """Returns the size of a launch for some of the sequences."""
        shape = self.kv.shape
        return AttentionWork(
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            num_kv_heads=shape.num_kv_heads,
            group=self.queries.shape[1] // shape.num_kv_heads,
            head_dim=shape.head_dim,
            element_bytes=self.queries.element_size(),
            kv_element_bytes=self.kv.keys.element_size(),
            is_hopper=is_hopper(self.queries.device),
        )

    def launch_chunks(self, tiling: Tiling, work: AttentionWork, first: int) -> None:
        """Attends for the sequences from `first` on. Those before have a token each."""
        kv, scoring = self.kv, self.scoring
        attend_kernel[(num_row_tiles(work, tiling.rows), kv.shape.num_kv_heads)](
            *self._tensors(),
            *self._sequences(),
            *(first, self.batch.num_sequences, scoring.scale, scoring.softcap or 0.0),
            **self._constants(tiling),
        )

    def launch_decodes(self, tiling: Tiling, work: AttentionWork) -> None:
        """Attends for the first sequences, which have a token each."""
        kv, batch, scoring, num_decodes = self.kv, self.batch, self.scoring, work.num_sequences
        partials, log_weights = self._allocate_partials(num_decodes, tiling.splits)
        splits = {"NUM_SPLITS": tiling.splits, "SPAN_KEYS": tiling.span_keys}
        attend_decodes_kernel[(num_decode_programs(work, tiling.splits), kv.shape.num_kv_heads)](
            *self._tensors(),
            *(partials, log_weights),
            *self._sequences(),
            *(num_decodes, scoring.scale, scoring.softcap or 0.0),
            **self._constants(tiling),
            **splits,
            SEQUENCES=SEQUENCES_AT_ONCE,
        )
        if tiling.splits > 1:
            decoded = self.outputs[:num_decodes]
            combine_kernel[decoded.shape[:2]](
                *(partials, log_weights, self._sinks(), decoded, batch.query_starts, batch.context_lengths),
                *decoded.stride()[:2],
                HEAD_DIM=kv.shape.head_dim,
                PADDED_DIM=padded_dim(kv.shape.head_dim),
                WINDOW=scoring.sliding_window or 0,
                HAS_SINKS=self.sinks is not None,
                **splits,
                IS_PADDED=batch.is_padded,
                num_warps=COMBINE_WARPS,
            )

    def _sinks(self) -> Tensor:
        return self.outputs if self.sinks is None else self.sinks

    def _tensors(self) -> tuple[Tensor, ...]:
        kv = self.kv
        return self.queries, kv.keys, kv.values, *scales_of(kv), self._sinks(), self.outputs

    def _sequences(self) -> tuple[Tensor | int, ...]:
        """Returns the tensors of sequences, and all strides."""
        batch = self.batch
        return (
            *(batch.query_starts, batch.context_lengths, batch.block_tables, batch.table_rows),
            *(*self.queries.stride()[:2], *self.outputs.stride()[:2], *self.kv.keys.stride()[:3]),
            batch.block_tables.stride(0),
        )

    def _constants(self, tiling: Tiling) -> dict[str, int | bool]:
        shape, scoring = self.kv.shape, self.scoring
        return {
            "GROUP": self.queries.shape[1] // shape.num_kv_heads,
            "HEAD_DIM": shape.head_dim,
            "PADDED_DIM": padded_dim(shape.head_dim),
            "BLOCK_SIZE": self.batch.block_size,
            "TILE_ROWS": tiling.rows,
            "TILE_KEYS": tiling.keys,
            "WINDOW": scoring.sliding_window or 0,
            "IS_CAPPED": scoring.softcap is not None,
            "HAS_SINKS": self.sinks is not None,
            "IS_PADDED": self.batch.is_padded,
            "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
        }

    def _allocate_partials(self, num_decodes: int, num_splits: int) -> tuple[Tensor, Tensor]:
        """Allocates the partial results and their weights; one split needs none."""
        if num_splits == 1:
            return self.outputs, self.outputs
        num_tokens, num_heads, head_dim = num_decodes, *self.outputs.shape[1:]
        sizes, device = (num_tokens, num_heads, num_splits), self.outputs.device
        return torch.empty((*sizes, head_dim), dtype=torch.float32, device=device), torch.empty(
            sizes, dtype=torch.float32, device=device
        )


@cache
def is_hopper(device: torch.device) -> bool:
    """Returns whether a device is a GPU of compute capability 9.0."""
    return is_gpu(device) and torch.cuda.get_device_capability(device) == (9, 0)


def scales_of(kv: LayerKv) -> tuple[Tensor, Tensor]:
    """Returns the scales of keys and of values as the kernels' arguments; without FP8 unused tensors."""
    if not kv.scales:
        return kv.keys, kv.values
    keys, values = kv.scales
    return keys, values


def with_contiguous_heads(tensor: Tensor) -> Tensor:
    """Returns the tensor with contiguous heads; the kernels support any strides of tokens and heads."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
