"""The weights of a model and the memory that they take in an executor, by the role that decides their type there.

They are counted in the headers of safetensors and GGUF files, or computed from the configuration. Matrices of a
quantized checkpoint stay numbers of 4 or 8 bits; on a CPU they have a scale, and if need be a shift, per group of input
columns, on a GPU what they have in the checkpoint. The output layer has a copy of its own on a CPU where it is tied to
the embedding.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from inflight.common.model_files.gguf_architectures import ARCHITECTURES
from inflight.common.model_files.gguf_header import GgufHeader
from inflight.common.model_files.layer_sizes import BYTES_PER_NUMBER, LayerSizes
from inflight.common.model_source import ModelError, read_json
from inflight.common.settings import SettingError

WEIGHT_DTYPES = ("auto", "quantized", "quantized_a8", "dense", "int8", "int4", "fp8")
KV_CACHE_DTYPES = ("auto", "int8", "fp8")
# Sizes of groups that the CPU's products have; larger ones are divided, the best first.
GROUP_SIZES = (128, 64, 32, 16)
# Of NVFP4.
FP4_GROUP_SIZE = 16
_MAX_HEADER_BYTES = 100_000_000
# Tensors of quantized checkpoints: those whose words hold several weights, and those beside the weights.
_PACKED = (".qweight", ".weight_packed")
_SCALES = (".scales", ".weight_scale")
_BESIDE = (
    *(".qzeros", ".g_idx", ".weight_zero_point", ".weight_shape", ".weight_g_idx", *_SCALES),
    *(".weight_scale_inv", ".weight_scale_2", ".weight_global_scale"),
    *(".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale"),
    *(".k_scale", ".v_scale", ".q_scale", ".kv_scale"),
    *(".gate_up_proj_scales", ".down_proj_scales"),
)
# Weights that executors do not load: of images, and of layers that predict further tokens (Qwen3.5).
_UNUSED = ("model.visual.", "mtp.")
# Types of safetensors of FP8, and of pairs in FP4.
_FP8, _FP4 = "F8_E4M3", "U8"


class Role(StrEnum):
    """What a weight is part of. Vectors and routers of experts are in float32 on a CPU."""

    EMBEDDING = "embedding"
    HEAD = "head"
    MATRIX = "matrix"
    EXPERT = "expert"
    VECTOR = "vector"


@dataclass(frozen=True, slots=True)
class Codes:
    """The form of quantized weights. `scale_bytes` is the size of a scale or shift beside float32 activations; beside
    bfloat16 it is at most 2. Each `depth` weights, those of an output column, have a factor. On a GPU a group of
    `gpu_group_size` weights, or of `group_size` if that is 0, has `gpu_group_bytes`.
    """

    bits: int
    group_size: int
    has_shifts: bool
    scale_bytes: int
    depth: int = 0
    gpu_group_bytes: float = 0
    gpu_group_size: int = 0

    @property
    def gpu_bytes_each(self) -> float:
        """Memory of a weight on a GPU."""
        return self.bits / 8 + self.gpu_group_bytes / (self.gpu_group_size or self.group_size)


@dataclass(frozen=True, slots=True)
class WeightCount:
    """The number of weights of a role and form; dense without `codes`."""

    role: Role
    number: int
    codes: Codes | None = None


Weights = tuple[WeightCount, ...]

# Experts of gpt-oss: a scale of a byte for each group.
MXFP4_EXPERTS = Codes(4, 32, False, 1, gpu_group_bytes=1)
# What GGUF's types become: bits, size of groups, whether they have shifts, whether 16 bits hold their scales exactly.
GGUF_CODES = {
    "Q4_0": Codes(4, 32, False, 2),
    "Q4_1": Codes(4, 32, True, 4),
    "Q5_0": Codes(8, 32, False, 2),
    "Q5_1": Codes(8, 32, True, 4),
    "Q8_0": Codes(8, 32, False, 2),
    "Q2_K": Codes(4, 16, True, 4),
    "Q3_K": Codes(4, 16, False, 4),
    "Q4_K": Codes(4, 32, True, 4),
    "Q5_K": Codes(8, 32, True, 4),
    "Q6_K": Codes(8, 16, False, 4),
    "IQ4_NL": Codes(8, 32, False, 2),
    "IQ4_XS": Codes(8, 32, False, 4),
    "MXFP4": MXFP4_EXPERTS,
}
GGUF_DENSE = ("F32", "F16", "BF16")
# Architectures whose files are read as they are; executors import others as dense models.
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", *ARCHITECTURES)
# With `int4` executors round matrices to 4 bits and the output layer to 8, with these forms; with `int8` to groups of
# 64 with a scale of 4 bytes.
_ROUNDED = {Role.MATRIX: Codes(4, 32, True, 4), Role.HEAD: Codes(8, 32, False, 4)}
_INT8_BYTES = 1 + 4 / 64
_FACTOR_BYTES = 4


def cpu_weight_bytes(weights: Weights, dtype: str, weight_dtype: str) -> int:
    """Returns the memory of the weights in an executor on a CPU, without padding of rows.

    With `auto` they are as in the checkpoint; an executor with enough memory may expand them.

    Raises:
        SettingError: executors refuse the type for this checkpoint.
    """
    is_quantized = any(weight.codes is not None for weight in weights)
    if weight_dtype == "int4" and is_quantized:
        raise SettingError("--weight-dtype int4 is for models that are not quantized, and this checkpoint is")
    if weight_dtype in ("quantized", "quantized_a8") and not is_quantized:
        raise SettingError(f"--weight-dtype {weight_dtype} is for quantized checkpoints, and this one is not")
    return math.ceil(sum(weight.number * _bytes_each(weight, dtype, weight_dtype) for weight in weights))


def _bytes_each(weight: WeightCount, dtype: str, weight_dtype: str) -> float:
    if weight.role is Role.VECTOR:
        return 4
    if weight_dtype == "int8" and weight.role in (Role.MATRIX, Role.EXPERT):
        return _INT8_BYTES
    if weight_dtype in ("auto", "quantized", "quantized_a8"):
        codes = weight.codes
    else:
        codes = _ROUNDED.get(weight.role) if weight_dtype == "int4" else None
    if codes is None or weight.role is Role.EMBEDDING:
        return BYTES_PER_NUMBER[dtype]
    scale_bytes = min(2, codes.scale_bytes) if dtype == "bfloat16" else codes.scale_bytes
    factor = _FACTOR_BYTES / codes.depth if codes.depth else 0
    return codes.bits / 8 + (1 + codes.has_shifts) * scale_bytes / codes.group_size + factor


def weights_of_gguf(header: GgufHeader) -> Weights:
    """Counts the weights of a GGUF file."""
    is_read = header.architecture in GGUF_ARCHITECTURES and all(
        name in GGUF_CODES or name in GGUF_DENSE for name in header.type_names
    )
    roles = {"token_embd.weight": Role.EMBEDDING, "output.weight": Role.HEAD}
    count: Counter[tuple[Role, Codes | None]] = Counter()
    for tensor in header.tensors:
        role = roles.get(tensor.name, Role.MATRIX)
        if len(tensor.shape) < 2 or ".ffn_gate_inp." in tensor.name:
            role = Role.VECTOR
        elif tensor.name.endswith("_exps.weight"):
            role = Role.EXPERT
        codes = GGUF_CODES.get(tensor.type_name) if is_read else None
        if codes is not None:
            # An offset in float32, or a code that stands for 0.
            group_bytes = codes.scale_bytes + (4 if codes.has_shifts else 1)
            gpu_bytes = codes.gpu_group_bytes or group_bytes
            codes = replace(codes, depth=tensor.shape[-1], gpu_group_bytes=gpu_bytes)
        count[role, codes] += math.prod(tensor.shape)
    return _counted(count)


def weights_of_folder(folder: Path, config: Mapping[str, Any]) -> Weights | None:
    """Counts the weights in the headers of the safetensors files; None if one or all are missing."""
    index = read_json(folder / "model.safetensors.index.json")
    names = sorted(set(index.get("weight_map", {}).values())) or [path.name for path in folder.glob("*.safetensors")]
    if "model.safetensors" in names:
        names = ["model.safetensors"]  # others are those of an adapter, or the same weights in another form
    if not names or not all((folder / name).is_file() for name in names):
        return None
    quantization = _Quantization(config)
    count: Counter[tuple[Role, Codes | None]] = Counter()
    for name in names:
        tensors = _header(folder / name)
        try:
            scales = [tensor["dtype"] for key, tensor in tensors.items() if key.endswith(_SCALES)]
            for key, tensor in tensors.items():
                if not key.endswith(_BESIDE) and not key.startswith(_UNUSED):
                    number, codes = quantization.of(key, tensor["shape"], tensor["dtype"], "F32" in scales)
                    count[_role(key, tensor["shape"]), codes] += number
        except (KeyError, TypeError, AttributeError):
            raise ModelError(f"weight file {folder / name} has a damaged header") from None
    return _counted(count)


def computed_weights(
    config: Mapping[str, Any], num_layers: int, num_experts: int, vocabulary_size: int, sizes: LayerSizes
) -> Weights:
    """Returns the weights by the configuration: embeddings, and for each layer attention, a gated feed-forward (of each
    expert) and two norms."""
    has_experts = num_experts > 1
    attention = num_layers * 2 * sizes.hidden * (sizes.attention + sizes.kv)
    feed_forward = num_layers * num_experts * 3 * sizes.hidden * sizes.inner
    vectors = sizes.hidden * (1 + num_layers * (2 + num_experts * has_experts))
    quantization = _Quantization(config)
    codes = quantization.of_rows(sizes.hidden)
    return (
        WeightCount(Role.EMBEDDING, vocabulary_size * sizes.hidden),
        WeightCount(Role.HEAD, vocabulary_size * sizes.hidden),
        WeightCount(Role.MATRIX, attention + (0 if has_experts else feed_forward), codes),
        WeightCount(Role.EXPERT, feed_forward if has_experts else 0, quantization.of_experts(sizes.hidden)),
        WeightCount(Role.VECTOR, vectors),
    )


class _Quantization:
    """The form of the quantized tensors of a folder, by its configuration. Of several groups the first counts."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        fields = config.get("quantization_config") or config.get("compression_config") or {}
        groups = [*(fields.get("config_groups") or {}).values()]
        weights = groups[0]["weights"] if groups else fields
        self._is_quantized = bool(fields)
        self._has_row_words = "awq" in (
            fields.get("quant_method"),
            str(fields.get("packing_format")).rpartition("_")[2],
        )
        method, algorithm = str(fields.get("quant_method")), str(fields.get("quant_algo"))
        self._has_fused_experts = method == "mxfp4"
        self._is_float = weights.get("type") == "float" or method == "fp8" or method.startswith("modelopt")
        self._bits = max(1, int(weights.get("num_bits", 8) if groups else weights.get("bits", 8)))
        if "NVFP4" in algorithm:
            self._bits = 4
        self._block = weights.get("weight_block_size") or weights.get("block_structure") or ()
        self._group_size = int(weights.get("group_size") or -1)
        is_symmetric = weights.get("symmetric", True) if groups else weights.get("sym", not weights.get("zero_point"))
        self._has_shifts = not is_symmetric

    def of(self, name: str, shape: list[int], dtype: str, has_float32_scales: bool) -> tuple[int, Codes | None]:
        """Returns the number of weights in a tensor, and their form."""
        number = math.prod(shape)
        if self._has_fused_experts:
            return (2 * number, MXFP4_EXPERTS) if name.endswith("_blocks") else (number, None)
        if dtype == _FP8:
            return number, self._fp8(shape[1])
        if dtype == _FP4:
            return 2 * number, self._fp4(2 * shape[1])
        if name.endswith(_PACKED):
            number *= 32 // self._bits
        elif dtype != "I8":
            return number, None
        if not self._is_quantized or self._is_float:
            return number, None
        # The words of GPTQ and compressed-tensors hold weights of a column, those of AWQ of a row.
        depth = shape[0] if name.endswith(".qweight") else shape[1]
        depth *= 32 // self._bits if name.endswith(_PACKED) and not self._has_row_words else 1
        size = self._group_size if self._group_size > 0 else depth
        divisor = next((part for part in GROUP_SIZES if size % part == 0), None)
        if divisor is None and self._group_size > 0:
            return number, None  # executors expand groups of other sizes
        scale_bytes = 4 if has_float32_scales else 2
        cpu = self._bits, divisor or GROUP_SIZES[-1], self._has_shifts, scale_bytes, depth
        return number, Codes(*cpu, scale_bytes + 1, min(size, GROUP_SIZES[0]) if self._group_size > 0 else size)

    def of_rows(self, depth: int) -> Codes | None:
        """Returns the form of matrices whose rows have so many weights."""
        if self._is_quantized and self._is_float:
            return self._fp8(depth) if self._bits == 8 else self._fp4(depth)
        return self.of("q_proj.weight", [1, depth], "I8", False)[1]

    def of_experts(self, depth: int) -> Codes | None:
        """Returns the same of experts."""
        return MXFP4_EXPERTS if self._has_fused_experts else self.of_rows(depth)

    def _fp8(self, depth: int) -> Codes:
        """The form of FP8: with scales of a row or block in float32, on a CPU of each row of a block."""
        shared = self._block[1] if self._block else depth
        size = next((part for part in GROUP_SIZES if shared % part == 0 and depth % part == 0), GROUP_SIZES[-1])
        return Codes(8, size, False, 4, depth, 4, math.prod(self._block) if self._block else depth)

    def _fp4(self, depth: int) -> Codes:
        """The form of FP4: with scales of a byte and, in groups of 16, a factor of each row; on a CPU these have scales
        of 16 bits."""
        size = self._group_size if self._group_size > 0 else FP4_GROUP_SIZE
        is_nvfp4 = size == FP4_GROUP_SIZE
        return Codes(4, size, False, 2 if is_nvfp4 else 1, depth, 1 + (4 * size / depth if is_nvfp4 else 0), size)


def _role(name: str, shape: list[int]) -> Role:
    if len(shape) < 2 or name.endswith((".gate.weight", ".router.weight")):
        return Role.VECTOR
    if ".experts." in name:
        return Role.EXPERT
    if "embed_tokens" in name or name.endswith(("wte.weight", ".embeddings.weight")):
        return Role.EMBEDDING
    return Role.HEAD if name.startswith("lm_head.") else Role.MATRIX


def _counted(count: Counter[tuple[Role, Codes | None]]) -> Weights:
    """Returns the counts, with the output layer of a tied embedding."""
    weights = [WeightCount(role, number, codes) for (role, codes), number in count.items()]
    if all(weight.role is not Role.HEAD for weight in weights):
        tied = [weight for weight in weights if weight.role is Role.EMBEDDING]
        weights += [WeightCount(Role.HEAD, weight.number, weight.codes) for weight in tied]
    return tuple(weights)


def _header(path: Path) -> dict[str, Any]:
    """Reads a safetensors header: its length (8 bytes, little endian), the header (JSON); tensors follow."""
    try:
        with path.open("rb") as file:
            num_bytes = struct.unpack("<Q", file.read(8))[0]
            if num_bytes > _MAX_HEADER_BYTES:
                raise ValueError(num_bytes)
            header = json.loads(file.read(num_bytes))
        return {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    except (OSError, ValueError, AttributeError, struct.error):
        raise ModelError(f"weight file {path} has a damaged header") from None
