"""Writers of tiny models in the formats of quantized checkpoints.

GGUF files are written by `gguf`, compressed-tensors folders by its own compressors. GPTQModel and AutoAWQ need a
compiler or CUDA to install, so their layouts are written here as their repositories describe them (GPTQModel
`nn_modules/qlinear`, AutoAWQ `awq/modules/linear/gemm.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Lfm2Config,
    LlamaConfig,
    MixtralConfig,
    NemotronHConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from inflight.common.model_source import resolve_model
from inflight.executor.formats.loading import load_network
from inflight.executor.model.loader import load_model
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.device.greedy import assert_same, generate_alone, generate_together

# Rows of 256 numbers, which superblocks of GGUF have.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
# Queries with gates, two heads of values for each of keys, and a rotary embedding of a part of a head.
HYBRID: dict[str, Any] = sizes(head_dim=32) | {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
HYBRID_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**sizes(**WIDE, initializer_range=0.05)),
    "qwen2": Qwen2Config(**sizes(**WIDE, initializer_range=0.05, tie_word_embeddings=True)),
    "qwen3_moe": Qwen3MoeConfig(
        **sizes(num_hidden_layers=1, num_experts=4, moe_intermediate_size=64, hidden_size=128),
        num_experts_per_tok=2,
        norm_topk_prob=True,
    ),
    "glm4_moe": Glm4MoeConfig(
        **sizes(n_routed_experts=4, n_shared_experts=1, moe_intermediate_size=64, first_k_dense_replace=1),
        num_experts_per_tok=2,
        attention_bias=True,
        routed_scaling_factor=1.5,
    ),
    "mixtral": MixtralConfig(**sizes(num_hidden_layers=1, num_local_experts=3, num_experts_per_tok=2)),
    "nemotron_h": NemotronHConfig(
        **sizes(head_dim=32, n_routed_experts=4, moe_intermediate_size=64, moe_shared_expert_intermediate_size=64),
        num_experts_per_tok=2,
        layers_block_type=["linear_attention", "moe", "linear_attention", "full_attention", "mlp"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=32,
    ),
    "lfm2": Lfm2Config(**sizes(), layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    "qwen3_5": Qwen3_5TextConfig(**HYBRID),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**HYBRID, **HYBRID_EXPERTS),
    "qwen3_next": Qwen3NextConfig(**HYBRID, **HYBRID_EXPERTS),
}
LINEARS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"),
    # Of recurrent layers, and of all of LFM2. Gates of heads stay dense.
    *("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_qkvz", "out_proj"),
)

# Weights and names of a layer's tensors, and the matrix that they stand for.
Encoded = tuple[dict[str, Tensor], Tensor]
Encoder = Callable[[Tensor], Encoded]


def save_quantized(folder: Path, family: str, config: Mapping[str, Any], encode: Encoder) -> Path:
    """Makes a folder with a quantized model, and one beside it, `<name>-dense`, with the matrices that it stands for,
    in float32. Returns the former."""
    dense = save_model(CONFIGS[family], folder.with_name(f"{folder.name}-dense"), has_random_vectors=True)
    weights = load_file(dense / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, weight in weights.items():
        layer, _, leaf = name.rpartition(".")
        if leaf != "weight" or not layer.endswith(LINEARS):
            stored[name] = weight
            continue
        tensors, weights[name] = encode(weight)
        stored |= {f"{layer}.{leaf}": tensor.contiguous() for leaf, tensor in tensors.items()}
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()}, dense / "model.safetensors", {"format": "pt"}
    )
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    fields = json.loads((dense / "config.json").read_text()) | {"quantization_config": dict(config)}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "generation_config.json").write_text((dense / "generation_config.json").read_text())
    return folder


def load_float32(path: Path) -> Any:
    """Returns the network of a folder or file, on a CPU."""
    return load_network(resolve_model(str(path)), torch.float32, torch.device("cpu"))[0]


def assert_runs_like(path: Path, dense: Path, backends: Sequence[str] = ("cpu", "reference"), **options: Any) -> None:
    """Runs a model by each backend. Its greedy tokens are those of transformers with dense matrices, and so are its
    network's logits, within 1e-4."""
    network: Any = AutoModelForCausalLM.from_pretrained(str(dense), dtype=torch.float32)
    prompts = [[5, 9, 33, 7, 8, 21, 60], [40, 3]]
    for backend in backends:
        source = resolve_model(str(path))
        model = load_model(source, dtype_name="float32", backend_name=backend, device_name="cpu", **options)
        for prompt, output in zip(prompts, generate_together(model, prompts, 8, 4), strict=True):
            assert_same(output, generate_alone(network, prompt, 8))
    with torch.inference_mode():
        ours, theirs = (one(torch.tensor([prompts[0]])).logits for one in (load_float32(path), network))
    assert (ours - theirs).abs().max() <= 1e-4


def gptq(bits: int, group_size: int, *, is_v1: bool = True, has_act_order: bool = False) -> Encoder:
    """Returns an encoder of GPTQ."""

    def encode(weight: Tensor) -> Encoded:
        num_in = weight.shape[1]
        columns = torch.arange(num_in)
        if has_act_order:
            columns = torch.randperm(num_in, generator=torch.Generator().manual_seed(1))
        # The groups are those of columns in another order than they are stored in.
        codes, zeros, scale = _rounded(weight[:, columns], bits, num_in if group_size == -1 else group_size)
        of_column = torch.empty(num_in, dtype=torch.int32)
        of_column[columns] = torch.arange(num_in, dtype=torch.int32) // (num_in // scale.shape[1])
        stored = torch.empty_like(codes)
        stored[:, columns] = codes
        dense = scale.float()[:, of_column.long()] * (stored - zeros[:, of_column.long()])
        tensors = {
            "qweight": _words(stored, bits).t(),
            "qzeros": _words((zeros.t() - int(is_v1)) % (1 << bits), bits),
            "scales": scale.t(),
            "g_idx": of_column,
        }
        return tensors, dense

    return encode


def gptq_config(bits: int, group_size: int, **changes: Any) -> dict[str, Any]:
    """Returns a configuration as GPTQModel writes it."""
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": False,
        "sym": False,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "meta": {"quantizer": ["gptqmodel:7.7.0"], "damp_percent": 0.05},
    } | changes


def awq(group_size: int) -> Encoder:
    """Returns an encoder of AWQ."""

    def encode(weight: Tensor) -> Encoded:
        codes, zeros, scale = _rounded(weight, 4, group_size)
        # AutoAWQ's order_map: place i of a word holds the output order_map[i] of eight.
        order = [0, 2, 4, 6, 1, 3, 5, 7]

        def interleaved(numbers: Tensor) -> Tensor:
            return _words(numbers.t().unflatten(1, (-1, 8))[..., order].flatten(1), 4)

        dense = scale.float().repeat_interleave(group_size, 1) * (codes - zeros.repeat_interleave(group_size, 1))
        return {"qweight": interleaved(codes), "qzeros": interleaved(zeros), "scales": scale.t()}, dense

    return encode


def awq_config(group_size: int, **changes: Any) -> dict[str, Any]:
    """Returns a configuration as AutoAWQ writes it."""
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": None,
    } | changes


# Fields that AutoRound writes under each label and that change no number.
AUTO_ROUND: dict[str, Any] = {
    "autoround_version": "0.9.0",
    "data_type": "int",
    "sym": True,
    "enable_quanted_input": True,
    "iters": 200,
    "provider": "auto-round",
    "to_quant_block_names": "model.layers",
}


def auto_round_config(packing: str | None, group_size: int, **changes: Any) -> dict[str, Any]:
    """Returns a configuration as AutoRound writes it."""
    fields = {"quant_method": "auto-round", "bits": 4, "group_size": group_size, "packing_format": packing}
    return AUTO_ROUND | fields | changes


def compressed(form: str, dtype: torch.dtype = torch.bfloat16, **weights: Any) -> Encoder:
    """Returns an encoder that is the compressor of compressed-tensors; the dense matrix is its decompressor's."""
    scheme = QuantizationScheme.model_validate({"targets": ["Linear"], "weights": weights})
    compressor = BaseCompressor.get_value_from_registry(form)

    def encode(weight: Tensor) -> Encoded:
        args = scheme.weights
        assert args is not None
        groups = {"group": args.group_size, "channel": weight.shape[1]}.get(str(args.strategy))
        grouped = weight.flatten()[None, None] if groups is None else weight.unflatten(1, (-1, groups))
        scale, zeros = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
        if groups is None:
            scale, zeros = scale.flatten(), zeros.flatten()
        given = {"weight": weight, "weight_scale": scale.to(dtype), "weight_zero_point": zeros.to(torch.int8)}
        if args.type == "float":
            del given["weight_zero_point"]
        stored = compressor.compress(given, scheme)
        return stored, compressor.decompress(dict(stored), scheme)["weight"]

    return encode


def compressed_config(form: str, **weights: Any) -> dict[str, Any]:
    """Returns a configuration as llm-compressor writes it."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"dynamic": False, "observer": "minmax", **weights},
                "input_activations": None,
                "output_activations": None,
            }
        },
    }


def save_gguf(
    path: Path,
    family: str,
    kinds: Sequence[gguf.GGMLQuantizationType],
    *,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    tensors_per_file: int = 0,
) -> Path:
    """Makes a GGUF file with matrices of these types in turn. Their bytes are random, with scales that keep the numbers
    small. `keys` of the family and `tensors` are added. With `tensors_per_file` there are several files."""
    config: Any = CONFIGS[family]
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, family, split_max_tensors=tensors_per_file)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(64)
    add_vocabulary(writer)
    add_keys(writer, family, keys or {})
    for name, numbers in (tensors or {}).items():
        writer.add_tensor(name, np.asarray(numbers, np.float32))
    num_matrices = 0

    def add(name: str, *shape: int) -> None:
        nonlocal num_matrices
        if len(shape) == 1:
            writer.add_tensor(name, 1 + 0.2 * generator.standard_normal(shape, np.float32))
            return
        kind = kinds[num_matrices % len(kinds)]
        num_matrices += 1
        writer.add_tensor(name, random_blocks(generator, kind, *shape), raw_dtype=kind)

    head_dim, num_kv_heads, hidden = 64, config.num_key_value_heads, config.hidden_size
    add("token_embd.weight", NUM_TOKENS, hidden)
    add("output_norm.weight", hidden)
    if not config.tie_word_embeddings:
        add("output.weight", NUM_TOKENS, hidden)
    for layer in range(config.num_hidden_layers):
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}.weight", hidden)
        for name, heads in (("q", config.num_attention_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
            add(f"blk.{layer}.attn_{name}.weight", heads * head_dim, hidden)
            if family == "qwen2":
                add(f"blk.{layer}.attn_{name}.bias", heads * head_dim)
        add(f"blk.{layer}.attn_output.weight", hidden, config.num_attention_heads * head_dim)
        for name in ("ffn_gate", "ffn_up"):
            add(f"blk.{layer}.{name}.weight", config.intermediate_size, hidden)
        add(f"blk.{layer}.ffn_down.weight", hidden, config.intermediate_size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_keys(writer: gguf.GGUFWriter, family: str, keys: Mapping[str, Any]) -> None:
    """Adds keys of an architecture, or of the tokenizer."""
    adders: dict[type, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in keys.items():
        name = key if key.startswith("tokenizer.") else f"{family}.{key}"
        writer.kv_data[0].pop(name, None)
        adders[type(value)](name, value)


def random_blocks(
    generator: np.random.Generator,
    kind: gguf.GGMLQuantizationType,
    num_rows: int,
    num_columns: int,
    largest: float = 0.002,
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns rows of blocks with random codes. The numbers of float16 are up to plus or minus `largest`."""
    num_numbers, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = generator.integers(0, 256, (num_rows, num_columns // num_numbers, num_bytes), np.uint8)
    for start in HALVES[kind.name]:
        halves = generator.uniform(-largest, largest, rows.shape[:2]).astype(np.float16)
        rows[..., start : start + 2] = halves[..., None].view(np.uint8)
    if kind.name == "MXFP4":
        rows[..., 0] = generator.integers(117, 121, rows.shape[:2], np.uint8)
    return rows.reshape(num_rows, -1)


# Where the blocks of a type have numbers of float16.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}
SPECIAL_TOKENS = ["<|start|>", "<|end|>", "<|turn|>"]
TOKENS = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
NUM_TOKENS = len(TOKENS)


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Adds a vocabulary of bytes and one merged token."""
    writer.add_vocab_size(NUM_TOKENS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(list(TOKENS))  # the writer keeps it, and tests change it there
    special, plain = [gguf.TokenType.CONTROL] * 3, [gguf.TokenType.NORMAL] * (NUM_TOKENS - 3)
    writer.add_token_types(special + plain)
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)


def _rounded(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds a matrix: codes `[out, in]` and zeros `[out, groups]` int32, scales float16. Zero 0 occurs."""
    groups = weight.unflatten(1, (-1, group_size))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1)
    low[0] = 0
    highest = (1 << bits) - 1
    scale = ((high - low) / highest).half()
    zeros = (-low / scale.float()).round().clamp(0, highest).int()
    codes = (groups / scale.float()[..., None] + zeros[..., None]).round().clamp(0, highest).int()
    return codes.flatten(1), zeros, scale


def _words(codes: Tensor, bits: int) -> Tensor:
    """Packs codes `[rows, n]` in int32 words `[rows, n * bits / 32]`, the lowest bits first."""
    shifts = torch.arange(0, 32, bits)
    words = (codes.long().unflatten(1, (-1, 32 // bits)) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()
