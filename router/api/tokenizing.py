"""Tokenizing for requests, and its bounds: lengths, rates, turns of tenants.

A text that is certainly too long is refused by its bytes, and a text of a tenant whose rate is used up is refused by
the ledger. Both happen before it is tokenized. Longer work runs on a thread, where tenants take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from inflight.common.errors import FieldViolation, invalid
from inflight.router.api.tokenizer_turns import TokenizerTurns
from inflight.router.dispatch.dispatcher import Dispatcher
from inflight.router.dispatch.pools import ModelBackend
from inflight.router.request.errors import refusal
from inflight.router.request.sampling import with_bad_word_ids
from inflight.router.request.spec import (
    ChatPrompt,
    GenerateSpec,
    ModelLimits,
    Prompt,
    ResolvedSampling,
    TextPrompt,
    TokenPrompt,
)
from inflight.router.store.types import TenantLimits
from inflight.router.text.tokenizer import ENCODE_IN_THREAD_CHARACTERS, TextModel

# A text that need not fit the context, because it is truncated or only tokenized, may have this many contexts of
# tokens.
MAX_CONTEXTS = 16
# The cost of one call of a tokenizer, in characters of a long text.
CHARACTERS_PER_CALL = 200
# Detokenizing takes about a microsecond per id.
DECODE_IN_THREAD_IDS = 1024

Made = TypeVar("Made")


def most_tokens(spec: GenerateSpec, limits: ModelLimits) -> int:
    """Returns the number of tokens above which a prompt can be refused without tokenizing it."""
    if spec.truncate_prompt_tokens is not None:
        return MAX_CONTEXTS * limits.context_length
    return limits.context_length - 1


async def check_rates(
    pool: ModelBackend, spec: GenerateSpec, allowed: TenantLimits, tenant: str, request_id: str
) -> None:
    """Raises `RequestError` RATE_LIMITED if the ledger would refuse the request for its tenant's rates, whose limits
    are `allowed`. `request_id` is the ledger's. If there is nothing to tokenize, the check is left to the submit."""
    if not allowed.has_rates or isinstance(spec.prompt, TokenPrompt):
        return
    tokens = spec.choices.generated * (least_prompt_tokens(pool.text, spec) + (spec.stopping.max_tokens or 1))
    refused = await pool.dispatcher.check_rates(tenant, allowed, tokens, request_id)
    if refused is not None:
        raise refusal(refused)


async def take_rates(dispatcher: Dispatcher, tenant: str, allowed: TenantLimits) -> None:
    """Takes a request of no tokens from a tenant's rates. Raises `RequestError` RATE_LIMITED."""
    if allowed.requests_per_s is None:
        return
    refused = await dispatcher.check_rates(tenant, allowed, 0, takes=True)
    if refused is not None:
        raise refusal(refused)


def least_prompt_tokens(text: TextModel, spec: GenerateSpec) -> int:
    """Returns the fewest tokens that the prompt can have, if the chat template keeps every message."""
    match spec.prompt:
        case TextPrompt():
            num_tokens = text.least_tokens(spec.prompt.text)
        case ChatPrompt():
            said = "".join(part.text for message in spec.prompt.chat.messages for part in message.content)
            num_tokens = text.least_tokens(said)
        case TokenPrompt():
            num_tokens = len(spec.prompt.ids)
    return min(num_tokens, spec.truncate_prompt_tokens or num_tokens)


class Tokenizing:
    """Turns prompts into tokens and tokens into text, for all models."""

    def __init__(self, turns: TokenizerTurns | None = None) -> None:
        self._turns = turns or TokenizerTurns()

    async def encode(self, text: TextModel, prompt: Prompt, most: int, tenant: str) -> list[int]:
        """Returns the prompt's token ids. Raises `RequestError`, also for a text that certainly has more than `most`
        tokens."""
        match prompt:
            case TokenPrompt():
                return list(prompt.ids)
            case TextPrompt():
                num_bytes = len(prompt.text)
            case ChatPrompt():
                num_bytes = prompt.chat.ByteSize()
        if num_bytes <= ENCODE_IN_THREAD_CHARACTERS:
            return encode_now(text, prompt, most)
        return await self._turns.run(tenant, num_bytes, lambda: encode_now(text, prompt, most))

    async def encode_bad_words(
        self, text: TextModel, sampling: ResolvedSampling, limits: ModelLimits, tenant: str
    ) -> ResolvedSampling:
        """Returns the parameters with the token sequences of `bad_words`. Raises `RequestError`."""

        def encode_words_now() -> list[tuple[int, ...]]:
            return bad_word_sequences(text, sampling.bad_words, limits.vocabulary_size)

        if not sampling.bad_words:
            return sampling
        num_characters = 2 * sum(len(word) + CHARACTERS_PER_CALL for word in sampling.bad_words)
        if num_characters <= ENCODE_IN_THREAD_CHARACTERS:
            return with_bad_word_ids(sampling, encode_words_now())
        return with_bad_word_ids(sampling, await self._turns.run(tenant, num_characters, encode_words_now))

    async def decode(self, text: TextModel, ids: Sequence[int], tenant: str, *, skip_special_tokens: bool) -> str:
        """Returns the text of token ids. Raises `RequestError`."""

        def decode_now() -> str:
            return text.decode(ids, skip_special_tokens=skip_special_tokens)

        return await self._of_ids(tenant, len(ids), decode_now)

    async def names(self, text: TextModel, ids: Sequence[int], tenant: str) -> list[str]:
        """Returns the name of each token in the vocabulary. Raises `RequestError`."""
        return await self._of_ids(tenant, len(ids), lambda: text.token_names(ids))

    async def _of_ids(self, tenant: str, num_ids: int, work: Callable[[], Made]) -> Made:
        if num_ids <= DECODE_IN_THREAD_IDS:
            return work()
        return await self._turns.run(tenant, 4 * num_ids, work)


def encode_now(text: TextModel, prompt: TextPrompt | ChatPrompt, most: int) -> list[int]:
    """Returns the token ids of a text or a conversation. Blocks. Raises `RequestError`."""
    if isinstance(prompt, ChatPrompt):
        return text.encode_chat(prompt.chat, most_tokens=most, add_generation_prompt=prompt.add_generation_prompt)
    text.check_length(prompt.text, most, prompt.field)
    return text.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)


def bad_word_sequences(text: TextModel, words: Sequence[str], vocabulary_size: int) -> list[tuple[int, ...]]:
    """Returns the token ids of words with and without a space before them. Blocks. Raises `RequestError` for a word
    without tokens. The model cannot produce a sequence with an id outside its vocabulary, which is left out."""
    sequences: list[tuple[int, ...]] = []
    for i, word in enumerate(words):
        bare = word.lstrip(" ") or word
        of_word = [tuple(text.encode_inside(form)) for form in (bare, f" {bare}")]
        if not any(of_word):
            raise invalid(FieldViolation(f"sampling.bad_words[{i}]", "has no tokens in the model's vocabulary"))
        sequences += [ids for ids in of_word if ids and max(ids) < vocabulary_size]
    return sequences
