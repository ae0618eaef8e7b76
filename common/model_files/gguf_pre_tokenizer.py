"""Pre-tokenizers of byte-level vocabularies in GGUF files, by `tokenizer.ggml.pre`.

The names and their rules are those of llama.cpp (src/llama-vocab.cpp). transformers knows some of them and splits the
text for all others as GPT-2 does, without an error, which changes the ids of prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Rules of transformers, by a name that it knows, and names with the same rule.
_SAME = {
    "llama-bpe": ("chatglm-bpe", "glm4"),
    "qwen2": ("hunyuan", "stablelm2", "solar-open", "grok-2"),
}
GPT2 = frozenset(
    {
        *("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v1-en", "jina-v2-code", "jina-v2-es", "jina-v2-de", "gigachat"),
        *("a.x-4.0", "mellum", "modern-bert", "roberta-bpe", "mpt", "olmo", "jais", "trillion", "granite-docling"),
        "exaone4",
    }
)
# Every digit is split off, then the rule is GPT-2's.
DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"})
# The parts of text that are split off, one after the other, and what is left.
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
PATTERNS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"),
    "deepseek-v3": _DEEPSEEK_V3,
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_PATTERN, "[0-9][0-9][0-9]"),
    "hunyuan-dense": _DEEPSEEK_V3,
    "seed-coder": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}


def set_pre_tokenizer(tokenizer: Any, name: str | None) -> str | None:
    """Gives a byte-level tokenizer that transformers has imported the rule of a name. Returns the reason if there is no
    such rule. A file without a name is from before April 2024 and has the rule of GPT-2."""
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as KNOWN

    backend = tokenizer.backend_tokenizer
    same = next((known for known, names in _SAME.items() if name in names), name)
    if name is None or name in GPT2 or name in KNOWN:
        return None
    if name in DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
        return None
    patterns = (KNOWN[same],) if same in KNOWN else PATTERNS.get(name)
    if patterns is None:
        return f"tokenizer.ggml.pre = {name!r} is not a known rule to split text"
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    return None
