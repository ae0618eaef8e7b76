"""A model that says fixed texts: its weights have the successor of each token, and nothing else changes its output.

Coding agents leave the choice of a tool to the model, so a test of them needs one that makes the call. Everything but
its weights is real: tokenizer, chat template, grammar, steps and KV cache.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from tests.support.text.text_models import smollm2

# The first prompts of coding agents have tens of thousands of tokens.
CONTEXT_LENGTH = 65536
HIDDEN_SIZE = 64
# The logit of a successor is 160, and those of other tokens are some 70 lower: they are never sampled.
WEIGHT_SCALE = 20.0
MIN_PIECE_CHARACTERS = 4
MARKERS = re.compile("(</?tool_call>)")


def save_fixed_model(folder: Path, texts: Mapping[str, str], template: str) -> dict[str, int]:
    """Makes a Hugging Face folder of a model that says one of `texts`: that of the token, its key, with which the chat
    template ends the prompt. Returns how many tokens each has."""
    smollm2().save_pretrained(folder)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    used: set[str] = set()
    answers = {start: list(_pieces(text, used)) for start, text in texts.items()}
    tokenizer.add_tokens([AddedToken(start, special=True) for start in answers])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in used])
    tokenizer.save_pretrained(folder)
    chains: list[list[int]] = []
    for start, pieces in answers.items():
        token_ids: Any = tokenizer.convert_tokens_to_ids([start, *pieces, str(tokenizer.eos_token)])
        chains.append(token_ids)
    _network(len(tokenizer), chains).save_pretrained(folder)
    return {start: len(pieces) for start, pieces in answers.items()}


def _pieces(text: str, used: set[str]) -> Iterator[str]:
    """Divides a text into tokens of which each has one successor: none is in `used`, to which they are added. The
    markers of calls are tokens of their own, as in most models."""
    for part in filter(None, MARKERS.split(text)):
        start = 0
        while start < len(part):
            ends = range(start + MIN_PIECE_CHARACTERS, len(part) - MIN_PIECE_CHARACTERS)
            free = (end for end in ends if part[start:end] not in used)
            end = len(part) if MARKERS.fullmatch(part) else next(free, len(part))
            piece, start = part[start:end], end
            assert piece not in used, f"{piece!r} occurs twice"
            used.add(piece)
            yield piece


def _network(vocabulary_size: int, chains: list[list[int]]) -> Any:
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=HIDDEN_SIZE,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT_LENGTH,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        network: Any = LlamaForCausalLM(config)
        embeddings, successors = network.model.embed_tokens.weight, network.lm_head.weight
        embeddings.copy_(torch.nn.functional.normalize(torch.randn_like(embeddings), dim=-1))
        successors.zero_()
        for chain in chains:
            for token_id, next_id in itertools.pairwise(chain):
                successors[next_id] += WEIGHT_SCALE * embeddings[token_id]
        # What attention and the other layers add.
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return network
