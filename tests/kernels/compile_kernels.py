"""A compiler of all kernels for a GPU that is not present: `python -m tests.kernels.compile_kernels 90`.

There may be several kinds of GPU. With `--digest` it compiles nothing and prints for each a digest of all that
determines the code, apart from Triton's version. With `--sample` it compiles the first launch of each kind of each
kernel.

The launchers run on tensors without storage. In place of a launch, the kernel is compiled for the arguments it was
given, specialised as Triton does it: for integers that are 1 and for what 16 divides. Prints a line of JSON each.
Runs in a process of its own, for this one has the interpreter.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import inflight.executor.attention.triton
from inflight.common.model_files.recurrent import MixerShape
from inflight.executor.attention.backend import KvShape, Scoring
from inflight.executor.attention.triton import TritonAttention
from inflight.executor.checkpoint.decoder_weights import CLAMPED, SQUARED_RELU, DecoderShape, Rope, Routing
from inflight.executor.experts.layer import ExpertLayer
from inflight.executor.experts.products import Activation, GroupedProduct
from inflight.executor.gpu.adapters import AdapterSlots
from inflight.executor.gpu.idle import idle_processed_sampling
from inflight.executor.gpu.layers import (
    Fp8Product,
    gated,
    gated_fp8,
    residual_norm,
    residual_norm_fp8,
    rope_write,
    rounded_rows,
    squared_relu,
    squared_relu_fp8,
)
from inflight.executor.gpu.processing import Processing, name_excluded
from inflight.executor.gpu.row_groups import TILE_ROWS, RowGroups
from inflight.executor.gpu.sampling import DrawRows, draw
from inflight.executor.gpu.step_buffers import StepBuffers
from inflight.executor.gpu.step_layout import StepLayout
from inflight.executor.kernels.coded import E4M3, E8M0, FP4, FP8, INT4, INT8, NUMBER
from inflight.executor.products.coded import CodedMatrix
from inflight.executor.recurrent.gpu_mixer import GpuMixer
from inflight.executor.recurrent.gpu_states import NUM_ROW_WORDS, GpuStates
from inflight.executor.recurrent.mixer import StateSizes
from inflight.executor.step.batch import StepBatch
from tests.support.device.mixers import num_columns, vector_sizes

META = torch.device("meta")
BLOCK_SIZE = 16
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


@dataclass(frozen=True, slots=True)
class Variant:
    """Attention of one kind of model."""

    shape: KvShape
    num_heads: int
    scoring: Scoring = Scoring(0.1)  # noqa: RUF009 - immutable
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None


LLAMA_8B = Variant(KvShape(8, 128), 32)
VARIANTS = (
    LLAMA_8B,
    Variant(KvShape(3, 64), 9),  # SmolLM2
    Variant(KvShape(8, 256), 16, Scoring(0.1, 4096, 50.0)),  # Gemma 2
    Variant(KvShape(32, 80), 32, Scoring(0.1, 2047)),
    Variant(KvShape(1, 96), 16, dtype=torch.float32),
    Variant(KvShape(8, 64), 64, Scoring(0.1, 128, has_sinks=True)),  # gpt-oss
)


def shape_of(num_heads: int, num_kv_heads: int, head_dim: int, intermediate_size: int) -> DecoderShape:
    """One layer of a Llama."""
    hidden_size, ropes = num_heads * head_dim, (Rope((1.0,), 1.0),)
    sizes = (1, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, 1000)
    return DecoderShape(*sizes, 1e-5, 0.1, (None,), ropes, (0,))


def experts_of(num_experts: int, num_chosen: int, hidden_size: int, size: int, routing: Routing) -> DecoderShape:
    """One layer with experts, of which a token uses some."""
    shape = shape_of(hidden_size // 128, 4, 128, size)
    return replace(shape, num_experts=num_experts, num_experts_per_token=num_chosen, routing=routing)


LLAMA_8B_SHAPE, SMOLLM2_SHAPE = shape_of(32, 8, 128, 14336), shape_of(9, 3, 64, 1536)


def coded(
    num_bits: int, group_size: int, scale: torch.dtype, kinds: tuple[int, int], beside: torch.dtype | None = None,
    *, row_block: int = 1, has_factors: bool = False, size: tuple[int, int] = (6144, 4096),
) -> CodedMatrix:  # fmt: skip
    """A matrix of codes without storage."""
    num_rows, num_columns = size
    scales = -(-num_columns // group_size), -(-num_rows // row_block)
    return CodedMatrix(
        torch.empty((num_rows, num_columns * num_bits // 8), dtype=torch.uint8, device=META),
        torch.empty(scales, dtype=scale, device=META),
        None if beside is None else torch.empty(scales, dtype=beside, device=META),
        torch.empty(num_rows, device=META) if has_factors else None,
        None,
        *kinds,
        group_size,
        row_block,
    )


PLAIN = NUMBER.value
CODED = (
    coded(4, 128, torch.float16, (INT4.value, PLAIN), torch.uint8),  # GPTQ, AWQ
    coded(4, 32, torch.float32, (INT4.value, PLAIN), torch.float32),  # Q4_K
    coded(8, 32, torch.float16, (INT8.value, PLAIN), torch.uint8),  # Q8_0
    coded(8, 4096, torch.float32, (FP8.value, PLAIN)),
    coded(8, 128, torch.float32, (FP8.value, PLAIN), row_block=128),
    coded(4, 32, torch.uint8, (FP4.value, E8M0.value)),
    coded(4, 16, torch.uint8, (FP4.value, E4M3.value), has_factors=True),
)
QWEN3_30B_SHAPE = replace(experts_of(128, 8, 2048, 768, Routing()), normalizes_experts=True)
GPT_OSS_SHAPE = replace(
    experts_of(32, 4, 2880, 2880, Routing()), activation=CLAMPED, gate_factor=1.702, gate_limit=7.0, has_sinks=True
)
NEMOTRON_3_NANO_SHAPE = replace(
    experts_of(128, 6, 2688, 1856, Routing(has_sigmoid=True, scale=2.5)),
    activation=SQUARED_RELU,
    normalizes_experts=True,
)
# DeepSeek-V3's router with the sizes of GLM-4.5-Air, and with groups.
GROUPED_SHAPE = experts_of(128, 8, 4096, 1408, Routing(has_sigmoid=True, num_groups=8, num_chosen_groups=4))
MIXERS = (
    (MixerShape(3, 2048), torch.bfloat16),  # LFM2-1.2B
    (MixerShape(4, 6144, 16, 16, 128, 128), torch.bfloat16),  # Qwen3.5-0.8B
    (MixerShape(4, 8192, 16, 32, 128, 128), torch.bfloat16),  # Qwen3.5-35B-A3B, Qwen3-Next
    (MixerShape(4, 144, 2, 6, 12, 16), torch.float32),
    (MixerShape(4, 3328, 1, 48, 128, 64, corrects=False), torch.bfloat16),  # Granite 4.0 H Tiny
    (MixerShape(4, 8448, 1, 128, 128, 64, corrects=False), torch.bfloat16),  # Granite 4.0 H Small
    (MixerShape(4, 6144, 8, 64, 128, 64, corrects=False), torch.bfloat16),  # Nemotron 3 Nano
    (MixerShape(4, 128, 2, 4, 12, 20, corrects=False), torch.float32),
)

# Conversions to and from e4m3 exist since sm_89.
FP8_VARIANT, MIN_FP8_CAPABILITY = replace(LLAMA_8B, kv_dtype=torch.float8_e4m3fn), 89

# New tokens of each sequence: decodes that fill the GPU, drafts to verify, a few decodes, a prompt beside decodes.
BATCHES = ([1] * 128, [4] * 8, [1] * 4, [1] * 32 + [480])


def main(capability: int, *, is_digest: bool, is_sample: bool) -> None:
    """Compiles everything, or a sample, or prints the digest."""
    seen: set[str] = set()
    sampled: set[tuple[str, bool]] = set()
    digest = hashlib.sha256(str(capability).encode())

    def compile_launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        names = [param.name for param in kernel.params]
        bound = dict(zip(names, args, strict=False)) | {name: options.pop(name) for name in names if name in options}
        source = specialised(kernel, bound)
        key = f"{kernel.__name__} {source.signature} {source.constants} {source.attrs} {options}"
        if key in seen:
            return
        seen.add(key)
        digest.update(f"{kernel.cache_key} {key}".encode())
        has_fp8 = "*fp8e4nv" in source.signature.values()
        kind = (kernel.__name__, has_fp8)
        if is_digest or (is_sample and kind in sampled):
            return
        sampled.add(kind)
        log = StringIO()
        with redirect_stdout(log):
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        figures = {"shared_bytes": compiled.metadata.shared, "num_fused": compiled.asm["ptx"].count("fma.")}
        figures |= figures_of_ptxas(log.getvalue()) | figures_of_pipeline(compiled.asm["ttgir"])
        sizes = [bound[param.name] for param in kernel.params if param.is_constexpr]
        name = {"kernel": kernel.__name__, "constants": sizes, "has_fp8": has_fp8}
        print(json.dumps(name | figures | options), flush=True)

    # The assembler's report is written to stdout; it has none for what is taken from the cache.
    triton.knobs.nvidia.dump_ptxas_log = True
    JITFunction.run = compile_launch
    vars(inflight.executor.attention.triton)["is_hopper"] = lambda device: capability == 90
    for variant in VARIANTS:
        for lengths in BATCHES if variant is LLAMA_8B else BATCHES[-1:]:
            launch_attention(variant, batch_of(lengths))
        launch_attention(variant, replace(batch_of(BATCHES[-1]), num_decodes=33, is_padded=True))
    if capability >= MIN_FP8_CAPABILITY:
        launch_attention(FP8_VARIANT, batch_of(BATCHES[-1]))
        for size in (4096, 14336):
            rounded_rows(empty(8, size, dtype=torch.bfloat16))
        rows = empty(8, 4096, dtype=torch.bfloat16)
        residual_norm_fp8(rows, rows, empty(4096, dtype=torch.bfloat16), 1e-5)
        gated_fp8(empty(8, 2 * 14336, dtype=torch.bfloat16))
        squared_relu_fp8(empty(8, 14336, dtype=torch.bfloat16))
        launch_scaled()
    launch_layers()
    for matrix in CODED:
        launch_coded(matrix)
    launch_experts()
    for shape in (LLAMA_8B_SHAPE, SMOLLM2_SHAPE):
        launch_adapters(shape)
    launch_recurrent()
    if is_digest:
        print(digest.hexdigest())


def figures_of_ptxas(log: str) -> dict[str, int]:
    """Registers of a thread, and bytes of its spills, as the assembler tells them."""
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert registers, log
    assert spills, log
    return {"registers": int(registers[1]), "spill_bytes": int(spills[1]) + int(spills[2])}


def figures_of_pipeline(code: str) -> dict[str, list[int]]:
    """Stages of the buffers that loops load ahead into, in the order of the code."""
    buffers = re.findall(r"ttg.local_alloc : \(\) -> !ttg.memdesc<(\d+)x\d+x\d+x\w+, [^>]*mutable>", code)
    return {"buffers": [int(stages) for stages in buffers]}


def specialised(kernel: Any, bound: dict[str, Any]) -> ASTSource:
    """The source of a kernel for these arguments."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, param in enumerate(kernel.params):
        value = bound[param.name]
        is_specialised = not param.do_not_specialize
        if param.is_constexpr or (is_specialised and isinstance(value, int) and value == 1):
            signature[param.name], constants[(index,)] = "constexpr", value
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = POINTERS[value.dtype] if isinstance(value, Tensor) else "i32"
            if isinstance(value, Tensor) or (is_specialised and value % 16 == 0):
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def launch_scaled() -> None:
    """Launches the kernels that read products of FP8 numbers."""

    def product(num_columns: int) -> Fp8Product:
        scales = empty(8, 1, dtype=torch.float32), empty(1, num_columns, dtype=torch.float32)
        return Fp8Product(empty(8, num_columns, dtype=torch.bfloat16), *scales)

    kv = TritonAttention().allocate(LLAMA_8B.shape, 8, BLOCK_SIZE, torch.float8_e4m3fn, META)
    words = empty(8, dtype=torch.int64)
    rope_write(product(6144), None, words, words, empty(8192, 128, dtype=torch.float32), kv, 1e-5)
    residual_norm_fp8(empty(8, 4096, dtype=torch.bfloat16), product(4096), empty(4096, dtype=torch.bfloat16), 1e-5)
    gated_fp8(product(2 * 14336))
    squared_relu_fp8(product(14336))


def batch_of(lengths: list[int]) -> StepBatch:
    """Sequences with so many new tokens, in contexts of up to 8,192."""
    num_tokens, num_sequences = sum(lengths), len(lengths)
    return StepBatch(
        token_ids=empty(num_tokens, dtype=torch.int32),
        positions=empty(num_tokens, dtype=torch.int32),
        slot_mapping=empty(num_tokens, dtype=torch.int64),
        query_starts=empty(num_sequences + 1, dtype=torch.int32),
        context_lengths=empty(num_sequences, dtype=torch.int32),
        block_tables=empty(num_sequences, 8192 // BLOCK_SIZE, dtype=torch.int32),
        table_rows=empty(num_sequences, dtype=torch.int32),
        logit_rows=empty(num_sequences, dtype=torch.int64),
        carried_rows=empty(0, dtype=torch.int64),
        carried_from=empty(0, dtype=torch.int64),
        num_decodes=sum(length == 1 for length in lengths),
        block_size=BLOCK_SIZE,
    )


def launch_attention(variant: Variant, batch: StepBatch) -> None:
    """Both ways of writing, and attention."""
    shape, dtype = variant.shape, variant.dtype
    backend = TritonAttention()
    kv = backend.allocate(shape, 100, BLOCK_SIZE, variant.kv_dtype or dtype, META)
    qkv = empty(batch.num_tokens, (variant.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, dtype=dtype)
    table, norm = empty(8192, shape.head_dim, dtype=torch.float32), empty(shape.head_dim, dtype=dtype)
    keys = empty(batch.num_tokens, shape.num_kv_heads, shape.head_dim, dtype=dtype)
    backend.write(kv, keys, keys, batch)
    rope_write(qkv, None, batch.positions, batch.slot_mapping, table, kv, 1e-5)
    queries = rope_write(qkv, (norm, norm), batch.positions, batch.slot_mapping, table, kv, 1e-5)
    sinks = empty(variant.num_heads, dtype=torch.float32) if variant.scoring.has_sinks else None
    backend.attend(queries, kv, batch, variant.scoring, sinks)


def launch_layers() -> None:
    """The rest of a step, with the sizes of Llama-3-8B and of SmolLM2."""
    for hidden_size, intermediate_size, vocabulary_size in ((4096, 14336, 128256), (576, 1536, 49152)):
        hidden = empty(8, hidden_size, dtype=torch.bfloat16)
        residual_norm(hidden, None, hidden[0], 1e-5)
        residual_norm(hidden, hidden, hidden[0], 1e-5)
        gated(empty(8, 2 * intermediate_size, dtype=torch.bfloat16))
        squared_relu(empty(8, intermediate_size, dtype=torch.bfloat16))
        words = empty(8, dtype=torch.int32)
        numbers = empty(8, dtype=torch.float32)
        rows = DrawRows(numbers, words, numbers, numbers, words, words, words, words, empty(9, dtype=torch.int32))
        logits = empty(8, vocabulary_size, dtype=torch.bfloat16)
        draw(logits, rows, words)
        sampling = idle_processed_sampling(vocabulary_size)
        Processing(META, vocabulary_size, 8192, 8).draw(logits, rows, sampling, words)
        name_excluded(logits, words)
    layout = StepLayout(100, 20, 20)
    buffers = StepBuffers(META, layout, 40, 512)
    buffers.resolve(layout)
    buffers.follow(0, 3)


def launch_coded(matrix: CodedMatrix) -> None:
    """Products of a few decodes, of many, and of a prompt, with a fused and with a narrow matrix."""
    for num_tokens in (8, 64, 300):
        inputs = empty(num_tokens, matrix.shape[1], dtype=torch.bfloat16)
        matrix.multiply(inputs, empty(num_tokens, matrix.shape[0], dtype=torch.bfloat16))


def launch_experts() -> None:
    """Layers of experts with pairs that are tiles of their own, and with tiles of 16, 64 and 128 rows; a shared expert
    with a gate; experts without gates; and a rotary embedding of half a head."""
    kinds = ((QWEN3_30B_SHAPE, False, 1), (GROUPED_SHAPE, True, 0), (NEMOTRON_3_NANO_SHAPE, True, 0))
    for shape, has_correction, num_gates in kinds:
        hidden_size, size, count = shape.hidden_size, shape.intermediate_size, shape.num_experts
        activation = Activation.of(shape)
        num_inner = (1 + activation.has_gates) * size
        layer = ExpertLayer(
            shape,
            empty(count + num_gates, hidden_size, dtype=torch.bfloat16),
            empty(count, dtype=torch.float32) if has_correction else None,
            GroupedProduct(empty(count, num_inner, hidden_size, dtype=torch.bfloat16), count, activation),
            GroupedProduct(empty(count, hidden_size, size, dtype=torch.bfloat16), count),
        )
        for num_rows in (4, 32, 512, 4096):
            hidden = empty(num_rows, hidden_size, dtype=torch.bfloat16)
            layer.compute(hidden, hidden, lambda part: part)
    launch_coded_experts()
    kv = TritonAttention().allocate(KvShape(8, 128), 100, BLOCK_SIZE, torch.bfloat16, META)
    words, norm = empty(8, dtype=torch.int64), empty(128, dtype=torch.bfloat16)
    qkv, table = empty(8, 48 * 128, dtype=torch.bfloat16), empty(8192, 64, dtype=torch.float32)
    rope_write(qkv, (norm, norm), words, words, table, kv, 1e-5)


def launch_recurrent() -> None:
    """Recurrent layers of decodes, without drafts and with some, and of chunks."""
    for shape, dtype in MIXERS:
        columns = num_columns(shape)
        vectors = tuple(empty(size, dtype=torch.float32) for size in vector_sizes(shape).values())
        mixer = GpuMixer(shape, empty(shape.conv_width, shape.channels, dtype=torch.float32), vectors, 1)
        for max_drafts, lengths in ((0, BATCHES[0]), (7, BATCHES[0]), (0, BATCHES[-1])):
            states = GpuStates(shape, 2, dtype, META)
            states.reserve(StateSizes(128, 8, max_drafts))
            batch = batch_of(lengths)
            rows = empty(batch.num_sequences, NUM_ROW_WORDS, dtype=torch.int32)
            projected = empty(batch.num_tokens, columns, dtype=dtype)
            mixer.mix(projected, replace(batch, state_rows=rows), states.tensors, 1e-6)


def launch_coded_experts() -> None:
    """Experts of gpt-oss in MXFP4 with biases; of Qwen3-30B-A3B in FP8 blocks, and in GPTQ with act-order; and of
    Nemotron 3 Nano in FP8."""
    kinds: dict[str, tuple[DecoderShape, Callable[[tuple[int, int]], CodedMatrix]]] = {
        "mxfp4": (GPT_OSS_SHAPE, lambda size: coded(4, 32, torch.uint8, (FP4.value, E8M0.value), size=size)),
        "fp8": (
            QWEN3_30B_SHAPE, lambda size: coded(8, 128, torch.float32, (FP8.value, PLAIN), row_block=128, size=size),
        ),
        "fp8 of matrices": (
            NEMOTRON_3_NANO_SHAPE, lambda size: coded(8, size[1], torch.float32, (FP8.value, PLAIN), size=size),
        ),
        "gptq": (
            QWEN3_30B_SHAPE, lambda size: coded(4, 128, torch.float16, (INT4.value, PLAIN), torch.uint8, size=size),
        ),
    }  # fmt: skip
    for name, (shape, make) in kinds.items():
        hidden_size, size, count = shape.hidden_size, shape.intermediate_size, shape.num_experts
        activation = Activation.of(shape)

        def product(
            num_out: int, num_in: int, activation: Activation | None, name: str = name, count: int = count,
            make: Callable[[tuple[int, int]], CodedMatrix] = make,
        ) -> GroupedProduct:  # fmt: skip
            bias = empty(count, num_out, dtype=torch.bfloat16) if name == "mxfp4" else None
            order = empty(count, num_in, dtype=torch.int32) if name == "gptq" else None
            return GroupedProduct(make((count * num_out, num_in)), count, activation, bias, order)

        layer = ExpertLayer(
            shape,
            empty(count, hidden_size, dtype=torch.bfloat16),
            None,
            product((1 + activation.has_gates) * size, hidden_size, activation),
            product(hidden_size, size, None),
            empty(count, dtype=torch.bfloat16) if name == "mxfp4" else None,
        )
        for num_rows in (4, 32, 512, 4096):
            layer.compute(empty(num_rows, hidden_size, dtype=torch.bfloat16), None, lambda part: part)


def launch_adapters(shape: DecoderShape) -> None:
    """The changes of all products of a layer, for small and large ranks."""
    for max_rank in (8, 64):
        slots = AdapterSlots(shape, 8, max_rank, torch.bfloat16, META)
        groups = RowGroups(empty(8 * TILE_ROWS, dtype=torch.int32), empty(8, dtype=torch.int32))
        for product, size in slots.sizes[0].items():
            inputs, outputs = (empty(8, width, dtype=torch.bfloat16) for width in (size.num_inputs, size.num_outputs))
            slots.add(0, product, inputs, outputs, groups)


def empty(*sizes: int, dtype: torch.dtype) -> Tensor:
    """A tensor without storage."""
    return torch.empty(sizes, dtype=dtype, device=META)


if __name__ == "__main__":
    for argument in filter(str.isdigit, sys.argv[1:]):
        options = {f"is_{name}": f"--{name}" in sys.argv for name in ("digest", "sample")}
        main(int(argument), **options)
