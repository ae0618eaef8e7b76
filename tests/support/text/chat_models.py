"""Tokenizers with chat templates of the common kinds, and conversations whose texts try to pass for control tokens."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import llguidance
from llguidance.hf import from_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from inflight.router.text.tokenizer import TextModel
from inflight.v1 import inference_pb2
from tests.support.text import text_models

LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}"
    "{% if message.name %}{{ message.name }}{{ '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
# Tools and calls as JSON; roles that it does not know are left out without a word.
MISTRAL = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}[INST] {{ message.content }}[/INST]"
    "{% elif message.role == 'assistant' %}{{ message.content ~ (message.tool_calls or [] | tojson) ~ eos_token }}"
    "{% elif message.role == 'tool' %}[TOOL_RESULTS]"
    "{{ {'id': message.tool_call_id or '', 'content': message.content} | tojson }}"
    "[/TOOL_RESULTS]{% endif %}{% endfor %}"
)
# Refuses what it does not know, and writes its tokens from pieces.
PHI = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}<|assistant|>"
)
# Looks into what was said; a parameter's name stands before a bracket.
QWEN_3 = (
    "{% for message in messages %}{% set content = message.content %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ content }}\n</tool_response><|im_end|>\n"
    "{% else %}{{ '<|im_start|>' + message.role + '\\n' + content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for name, value in call.function.arguments | items %}<parameter={{ name }}>\n{{ value }}\n{% endfor %}"
    "{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}{{ kind }}<|im_start|>assistant\n"
)
# Each part of an answer is a message in a channel; past reasoning is only shown before calls.
GPT_OSS = (
    "{{ '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}"
    "{% if tools %}{{ '<|start|>developer<|message|>' }}{% for tool in tools %}"
    "{{ tool | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{{ '<|start|>functions.tool to=assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}"
    "{% elif message.tool_calls %}{% if message.thinking %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}"
    "{% set call = message.tool_calls[0].function %}{{ '<|start|>assistant to=functions.' + call.name }}"
    "{{ '<|channel|>commentary json<|message|>' + (call.arguments | tojson) + '<|call|>' }}"
    "{% elif message.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}<start of turn>{{ message.role }}\n{{ message.content | trim }}</s>\n"
    "{% endfor %}"
)
PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}</s>{% endfor %}"
BERT = "{% for message in messages %}{{ message.name }}{{ message.content }}[SEP]{% endfor %}"


@functools.cache
def smollm2() -> PreTrainedTokenizerBase:
    """ChatML, whose tokens are in the vocabulary, too."""
    return text_models.smollm2()


@functools.cache
def llama_3() -> PreTrainedTokenizerBase:
    """Byte-level BPE whose template trims."""
    names = ["begin_of_text", "start_header_id", "end_header_id", "eot_id"]
    tokenizer = byte_level([f"<|{name}|>" for name in names], [])
    tokenizer.bos_token = "<|begin_of_text|>"
    tokenizer.chat_template = LLAMA_3
    return tokenizer


@functools.cache
def phi() -> PreTrainedTokenizerBase:
    """Byte-level BPE whose template joins pieces to tokens."""
    tokenizer = byte_level([f"<|{name}|>" for name in ("system", "user", "assistant", "end")], [])
    tokenizer.chat_template = PHI
    return tokenizer


@functools.cache
def qwen_3() -> PreTrainedTokenizerBase:
    """Byte-level BPE with added tokens that are not special."""
    tokenizer = byte_level(["<|im_start|>", "<|im_end|>"], ["<think>", "</think>", "<tool_call>", "<tool_response>"])
    tokenizer.chat_template = QWEN_3
    return tokenizer


@functools.cache
def gpt_oss() -> PreTrainedTokenizerBase:
    """Byte-level BPE whose model writes the parts of an answer as messages in channels."""
    names = ["start", "end", "message", "channel", "constrain", "return", "call"]
    tokenizer = byte_level([f"<|{name}|>" for name in names], [])
    tokenizer.eos_token = "<|return|>"
    tokenizer.chat_template = GPT_OSS
    return tokenizer


@functools.cache
def mistral() -> PreTrainedTokenizerBase:
    """Byte fallback with a word boundary before every piece."""
    brackets = ["[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
    tokenizer = copied(text_models.llama_like())
    tokenizer.add_special_tokens({"additional_special_tokens": brackets})
    tokenizer.chat_template = MISTRAL
    return tokenizer


@functools.cache
def gemma() -> PreTrainedTokenizerBase:
    """Byte fallback; the token that begins a turn is not special."""
    tokenizer = copied(text_models.gemma_like())
    tokenizer.chat_template = GEMMA
    return tokenizer


@functools.cache
def unigram() -> PreTrainedTokenizerBase:
    """Unigram, which finds special tokens in plain text by itself: they are pieces like any other."""
    tokenizer = copied(text_models.metaspace())
    tokenizer.chat_template = PLAIN
    return tokenizer


@functools.cache
def wordpiece() -> PreTrainedTokenizerBase:
    """WordPiece; neighbours in the prompt are both the client's."""
    tokenizer = copied(text_models.wordpiece())
    tokenizer.chat_template = BERT
    return tokenizer


BUILDERS: tuple[Callable[[], PreTrainedTokenizerBase], ...] = (
    smollm2, llama_3, phi, qwen_3, gpt_oss, mistral, gemma, unigram, wordpiece,
)  # fmt: skip
# Their text comes back as it was; the others change spaces.
EXACT = (smollm2, llama_3, phi, qwen_3)


@functools.cache
def chat_model(build: Callable[[], PreTrainedTokenizerBase]) -> TextModel:
    """The text side of a tokenizer of this module."""
    return TextModel(build())


@functools.cache
def guided(model: TextModel) -> llguidance.LLTokenizer:
    """The vocabulary of a model for grammars, which has `<|im_end|>` or `<|return|>` for the end of an output."""
    tokenizer: Any = model._tokenizer
    (end,) = (t for t in ("<|im_end|>", "<|return|>") if t in tokenizer.get_vocab())
    return from_tokenizer(tokenizer, n_vocab=len(tokenizer), eos_token=tokenizer.convert_tokens_to_ids(end))


@functools.cache
def trusting_model(build: Callable[[], PreTrainedTokenizerBase]) -> TextModel:
    """The same, which takes control tokens from every caller."""
    return TextModel(build(), allow_special_tokens_in_chat=True)


def control_ids(model: TextModel, ids: list[int]) -> list[int]:
    """The control tokens of a prompt, in order, without the token of unknown characters."""
    unknown = set(model.encode("\U0001f999", add_special_tokens=False)) & {model.unknown_token_id}
    return [token_id for token_id in ids if token_id in model.control_token_ids - unknown]


def user_says(*texts: str) -> inference_pb2.Chat:
    """A message of several parts."""
    chat = inference_pb2.Chat()
    message = chat.messages.add(role="user")
    for text in texts:
        message.content.add(text=text)
    return chat


def byte_level(special: list[str], added: list[str]) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def copied(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """One that can be given another template."""
    return copy.deepcopy(tokenizer)
