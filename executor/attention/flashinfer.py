"""Attention of prompt chunks by FlashInfer, an optional package for NVIDIA GPUs.

It reads the KV that the Triton kernels write, without copies: their layout is FlashInfer's `HND`, and a block is a
page. Decodes stay with the Triton kernels, which CUDA graphs replay. FlashInfer plans on the host how it divides the
chunks of a step, so only steps that are launched kernel by kernel use it.

Written for flashinfer-python 0.7.2.post1; never run on a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.common.model_source import ModelError
from inflight.executor.attention.backend import AttentionBackend, KvShape, LayerKv, Scoring, StepAttention
from inflight.executor.device import is_gpu
from inflight.executor.step.batch import StepBatch

NAME = "flashinfer"
EXTRA = "inflight[flashinfer]"
# What its kernels are compiled for on every architecture.
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
# Partial results of split contexts; the size that its documentation recommends.
WORKSPACE_BYTES = 128 << 20
# Plans in use at once. A wrapper's next plan overwrites the host memory from which the previous one is copied.
RING = 2
# It must be faster by more than timings vary.
LARGEST_SHARE = 0.98

Words = npt.NDArray[np.int32]


class Wrapper(Protocol):
    """The methods of `BatchPrefillWithPagedKVCacheWrapper` that are used."""

    def plan(self, *arguments: Tensor | int, **options: object) -> None:
        """Takes the tensors of `ChunkIndices`, numbers of heads and KV heads, head size and block size; by name how
        scores are made, and types."""
        ...

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor: ...


class WrapperType(Protocol):
    """The class itself."""

    def __call__(self, float_workspace_buffer: Tensor, kv_layout: str) -> Wrapper: ...


@runtime_checkable
class DecodeAttention(Protocol):
    """What computes the decodes of a step."""

    def attend_decodes(
        self, queries: Tensor, kv: LayerKv, batch: StepBatch, scoring: Scoring, outputs: Tensor
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of a model whose layers are alike, and the different scorings of its layers."""

    num_heads: int
    kv: KvShape
    scorings: Sequence[Scoring]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkIndices:
    """The sequences behind the decodes of a batch, as FlashInfer takes them. With N sequences:

    sequence i has queries [query_starts[i], query_starts[i + 1]), counted from the first chunk's on, and blocks
    `blocks[block_starts[i] : block_starts[i + 1]]`, of which the last holds `last_block_tokens[i]` tokens.
    """

    query_starts: Words
    block_starts: Words
    blocks: Words
    last_block_tokens: Words

    @classmethod
    def of(cls, batch: StepBatch) -> ChunkIndices:
        """Reads them from a batch on the host."""
        first, size = batch.num_decodes, batch.block_size
        query_starts, lengths = batch.query_starts.numpy()[first:], batch.context_lengths.numpy()[first:]
        counts = -(-lengths // size)
        tables, rows = batch.block_tables.numpy(), batch.table_rows.numpy()[first:]
        blocks = [tables[row, :count] for row, count in zip(rows.tolist(), counts.tolist(), strict=True)]
        return cls(
            (query_starts - query_starts[0]).astype(np.int32),
            np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            np.concatenate(blocks).astype(np.int32),
            (lengths - np.maximum(counts - 1, 0) * size).astype(np.int32),
        )

    def tensors(self, *, is_pinned: bool) -> tuple[Tensor, ...]:
        """Returns copies on the host. A copy from pinned memory to the device makes the host wait for nothing."""
        fields = (self.query_starts, self.block_starts, self.blocks, self.last_block_tokens)
        copies = [torch.from_numpy(field.copy()) for field in fields]
        return tuple(copy.pin_memory() if is_pinned else copy for copy in copies)


@dataclass(frozen=True, slots=True, eq=False)
class PlannedAttention:
    """Attention of one step: of decodes by the kernels, of chunks by FlashInfer. `wrappers` are planned."""

    wrappers: Mapping[Scoring, Wrapper]
    decodes: DecodeAttention

    def attend(
        self, queries: Tensor, kv: LayerKv, batch: StepBatch, scoring: Scoring, sinks: Tensor | None = None
    ) -> Tensor:
        assert sinks is None
        outputs = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        first = batch.num_decodes
        self.decodes.attend_decodes(queries, kv, batch, scoring, outputs)
        self.wrappers[scoring].run(queries[first:], (kv.keys, kv.values), out=outputs[first:])
        return outputs


class FlashInfer:
    """Plans the chunks of steps. `is_required`: it is used even if it is slower."""

    def __init__(
        self,
        wrapper_type: WrapperType,
        heads: Heads,
        dtype: torch.dtype,
        device: torch.device,
        decodes: DecodeAttention,
        *,
        is_required: bool = False,
    ) -> None:
        # Kernels of one stream run one after the other, so all wrappers share it.
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._ring = [{scoring: wrapper_type(workspace, "HND") for scoring in heads.scorings} for _ in range(RING)]
        self._copied: list[torch.cuda.Event | None] = [None] * RING
        self._next = 0
        self._heads, self._dtype, self._is_cuda = heads, dtype, is_gpu(device)
        self._decodes = decodes
        self.is_required = is_required

    def plan(self, batch: StepBatch) -> StepAttention | None:
        """Plans a batch on the host, which is about to be computed in this stream without padding; None if it has only
        decodes. Waits if more than `RING` plans are on their way to the device."""
        if batch.num_decodes == batch.num_sequences:
            return None
        place, self._next = self._next, (self._next + 1) % RING
        copied = self._copied[place]
        if copied is not None:
            copied.synchronize()
        wrappers, heads = self._ring[place], self._heads
        indices = ChunkIndices.of(batch).tensors(is_pinned=self._is_cuda)
        for scoring, wrapper in wrappers.items():
            wrapper.plan(
                *indices,
                *(heads.num_heads, heads.kv.num_kv_heads, heads.kv.head_dim, batch.block_size),
                causal=True,
                sm_scale=scoring.scale,
                # Its windows do not count the query's own key; -1 is none.
                window_left=-1 if scoring.sliding_window is None else scoring.sliding_window - 1,
                logits_soft_cap=scoring.softcap or 0.0,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )
        if self._is_cuda:
            copied = torch.cuda.Event(blocking=True)
            copied.record()
            self._copied[place] = copied
        return PlannedAttention(wrappers, self._decodes)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a step with a chunk of `num_tokens` that ends a context, computed several times in both ways."""

    num_tokens: int
    context: int
    triton_s: Sequence[float]
    flashinfer_s: Sequence[float]

    @property
    def is_faster(self) -> bool:
        """Whether FlashInfer is clearly faster."""
        return median(self.flashinfer_s) < LARGEST_SHARE * median(self.triton_s)

    def __str__(self) -> str:
        with_it, without = (f"{1e3 * median(times):.2f} ms" for times in (self.flashinfer_s, self.triton_s))
        return f"{with_it} for {self.num_tokens} tokens of {self.context}, {without} with triton"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether FlashInfer is used, and why, in words. `is_warning`: it is installed and does not work."""

    is_used: bool
    reason: str
    is_warning: bool = False


def decide(failure: str | None, timings: Sequence[Timing], *, is_required: bool) -> Verdict:
    """Decides by the trial steps. `failure` says how their results differ or what fails.

    Raises:
        ModelError: it is required and fails.
    """
    if failure is not None:
        if is_required:
            raise ModelError(f"attention backend '{NAME}' cannot be used: {failure}")
        return Verdict(False, f"prompt chunks use triton, because {NAME} cannot be used: {failure}", is_warning=True)
    measured = "; ".join(map(str, timings))
    if is_required or all(timing.is_faster for timing in timings):
        return Verdict(True, f"prompt chunks use {NAME}: {measured}")
    return Verdict(False, f"prompt chunks use triton, because {NAME} is not faster: {measured}")


def open_flashinfer(
    backend_name: str,
    heads: Heads | None,
    dtype: torch.dtype,
    kv_dtypes: Sequence[torch.dtype],
    device: torch.device,
    backend: AttentionBackend,
) -> FlashInfer | None:
    """Opens FlashInfer if `backend_name` names it, or with `auto` if it is installed and can run, beside the `backend`
    of the fused forward pass. `heads` are None without that.

    Raises:
        ModelError: it is named and cannot run.
    """
    is_required = backend_name == NAME
    if not is_required and (backend_name != "auto" or not is_gpu(device)):
        return None
    decodes = backend if isinstance(backend, DecodeAttention) else None
    obstacle = unsupported_reason(None if decodes is None else heads, dtype, kv_dtypes)
    if heads is not None and decodes is not None and obstacle is None:
        found = import_wrapper()
        if not isinstance(found, str):
            return FlashInfer(found, heads, dtype, device, decodes, is_required=is_required)
        obstacle = found
    if is_required:
        raise ModelError(f"attention backend '{NAME}' cannot run: {obstacle}")
    return None


def unsupported_reason(heads: Heads | None, dtype: torch.dtype, kv_dtypes: Sequence[torch.dtype]) -> str | None:
    """Returns why it cannot compute a model; None if it can."""
    if heads is None:
        return "it needs the fused forward pass on a GPU"
    if dtype not in DTYPES:
        return f"it computes in {' and '.join(map(str, DTYPES))}, not {dtype}"
    if any(kv_dtype != dtype for kv_dtype in kv_dtypes):
        return "it cannot read a quantized KV cache, which has a scale for each token and KV head"
    if any(scoring.has_sinks for scoring in heads.scorings):
        return "it computes no attention sinks"
    if heads.kv.head_dim not in HEAD_DIMS:
        return f"it computes heads of {', '.join(map(str, HEAD_DIMS))} numbers, not {heads.kv.head_dim}"
    return None


def import_wrapper() -> WrapperType | str:
    """Returns the class, or why there is none."""
    try:
        module = importlib.import_module(NAME)
        found: WrapperType = module.BatchPrefillWithPagedKVCacheWrapper
    except ModuleNotFoundError as error:
        if error.name == NAME:
            return f"the package flashinfer-python is not installed (pip install '{EXTRA}')"
        return f"the package flashinfer-python cannot be imported: {error}"
    except Exception as error:  # it loads the libraries of CUDA, whose errors are of many types
        return f"the package flashinfer-python cannot be imported: {error}"
    return found
