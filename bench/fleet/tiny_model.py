"""A model of a few thousand weights, drawn at random: quick to start, and every token depends on all before it.

A Llama of two layers that reads and writes bytes: its text is full of characters in pieces, which is what a stream that
breaks in the middle of one has to get right. Or an LFM2 of three layers, two of them short convolutions, whose
executors have recurrent state beside KV. Written without torch, which only executors need.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

NAME = "tiny"
HYBRID = "tiny-hybrid"
NAMES = (NAME, HYBRID)
END = "<end>"
HIDDEN_SIZE = 64
INTERMEDIATE_SIZE = 96
NUM_LAYERS = 2
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_SIZE = 16
CONTEXT_LENGTH = 1024
HYBRID_LAYERS = ("conv", "full_attention", "conv")
CONVOLUTION_WIDTH = 3
# Large enough that attention matters to the logits.
WEIGHT_SCALE = 0.2


def write_tiny_model(folder: Path, seed: int = 0, name: str = NAME) -> Path:
    """Makes a Hugging Face folder of one of `NAMES` in `folder` and returns it; the same seed makes the same model."""
    model_folder = folder / name
    model_folder.mkdir(parents=True, exist_ok=True)
    vocabulary = write_tokenizer(model_folder)
    make_configuration, make_weights = (
        (_hybrid_configuration, _hybrid_weights) if name == HYBRID else (_configuration, _weights)
    )
    (model_folder / "config.json").write_text(json.dumps(make_configuration(len(vocabulary), vocabulary[END])))
    save_file(make_weights(len(vocabulary), seed), model_folder / "model.safetensors", metadata={"format": "pt"})
    return model_folder


def write_tokenizer(folder: Path, more_texts: Sequence[str] = ()) -> dict[str, int]:
    """Writes a tokenizer of bytes and returns its vocabulary. Ids of `more_texts` are read by nothing, and written."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *more_texts]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    configuration = {"tokenizer_class": "TokenizersBackend", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration))
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary


def _configuration(vocabulary_size: int, end_id: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary_size,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": CONTEXT_LENGTH,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": end_id,
        "bos_token_id": end_id,
        "torch_dtype": "float32",
    }


def _weights(vocabulary_size: int, seed: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary_size, HIDDEN_SIZE),
        "lm_head.weight": (vocabulary_size, HIDDEN_SIZE),
    }
    for layer in range(NUM_LAYERS):
        shapes |= {
            f"model.layers.{layer}.self_attn.q_proj.weight": (NUM_HEADS * HEAD_SIZE, HIDDEN_SIZE),
            f"model.layers.{layer}.self_attn.k_proj.weight": (NUM_KV_HEADS * HEAD_SIZE, HIDDEN_SIZE),
            f"model.layers.{layer}.self_attn.v_proj.weight": (NUM_KV_HEADS * HEAD_SIZE, HIDDEN_SIZE),
            f"model.layers.{layer}.self_attn.o_proj.weight": (HIDDEN_SIZE, NUM_HEADS * HEAD_SIZE),
            f"model.layers.{layer}.mlp.gate_proj.weight": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
            f"model.layers.{layer}.mlp.up_proj.weight": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
            f"model.layers.{layer}.mlp.down_proj.weight": (HIDDEN_SIZE, INTERMEDIATE_SIZE),
        }
    norms = dict.fromkeys(["model.norm.weight"], HIDDEN_SIZE)
    for layer in range(NUM_LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            norms[f"model.layers.{layer}.{norm}.weight"] = HIDDEN_SIZE
    return _drawn(rng, shapes, norms)


def _hybrid_configuration(vocabulary_size: int, end_id: int) -> dict[str, Any]:
    return _configuration(vocabulary_size, end_id) | {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "num_hidden_layers": len(HYBRID_LAYERS),
        "layer_types": list(HYBRID_LAYERS),
        "conv_L_cache": CONVOLUTION_WIDTH,
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        "norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }


def _hybrid_weights(vocabulary_size: int, seed: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary_size, HIDDEN_SIZE)}
    norms = {"model.embedding_norm.weight": HIDDEN_SIZE}
    for layer, kind in enumerate(HYBRID_LAYERS):
        prefix = f"model.layers.{layer}"
        if kind == "conv":
            shapes[f"{prefix}.conv.in_proj.weight"] = (3 * HIDDEN_SIZE, HIDDEN_SIZE)
            shapes[f"{prefix}.conv.conv.weight"] = (HIDDEN_SIZE, 1, CONVOLUTION_WIDTH)
            shapes[f"{prefix}.conv.out_proj.weight"] = (HIDDEN_SIZE, HIDDEN_SIZE)
        else:
            for name, num_heads in (("q", NUM_HEADS), ("k", NUM_KV_HEADS), ("v", NUM_KV_HEADS)):
                shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (num_heads * HEAD_SIZE, HIDDEN_SIZE)
            shapes[f"{prefix}.self_attn.out_proj.weight"] = (HIDDEN_SIZE, NUM_HEADS * HEAD_SIZE)
            norms |= {f"{prefix}.self_attn.{name}_layernorm.weight": HEAD_SIZE for name in ("q", "k")}
        shapes |= {f"{prefix}.feed_forward.{name}.weight": (INTERMEDIATE_SIZE, HIDDEN_SIZE) for name in ("w1", "w3")}
        shapes[f"{prefix}.feed_forward.w2.weight"] = (HIDDEN_SIZE, INTERMEDIATE_SIZE)
        norms |= {f"{prefix}.{name}.weight": HIDDEN_SIZE for name in ("operator_norm", "ffn_norm")}
    return _drawn(np.random.default_rng(seed), shapes, norms)


def _drawn(
    rng: np.random.Generator, shapes: Mapping[str, tuple[int, ...]], norms: Mapping[str, int]
) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    weights = {name: (rng.standard_normal(shape) * WEIGHT_SCALE).astype(np.float32) for name, shape in shapes.items()}
    return weights | {name: np.ones(size, dtype=np.float32) for name, size in norms.items()}
