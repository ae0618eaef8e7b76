"""Tokenizing for requests, and its bounds: lengths, rates, turns of tenants.

A text that is certainly too long is refused by its bytes, and a text of a tenant whose rate is used up is refused by
the ledger. Both happen before it is tokenized. Longer work runs on a thread, where tenants take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from inflight.common.errors import FieldViolation, invalid
from inflight.common.protocol import MAX_BAD_WORD_IDS, MAX_BAD_WORD_SEQUENCES
from inflight.router.api.tokenizer_turns import TokenizerTurns
from inflight.router.dispatch.dispatcher import Dispatcher
from inflight.router.dispatch.pools import ModelPool
from inflight.router.ledger.types import TenantLimits
from inflight.router.request.errors import refusal
from inflight.router.request.ids import ledger_id
from inflight.router.request.submit import ModelLimits
from inflight.router.text.tokenizer import ENCODE_IN_THREAD_CHARACTERS, TextModel
from inflight.v1 import inference_pb2, resume_pb2, types_pb2

# A text that need not fit the context, because it is truncated or only tokenized, may have this many contexts of
# tokens.
MAX_CONTEXTS = 16
# The cost of one call of a tokenizer, in characters of a long text.
CHARACTERS_PER_CALL = 200
# Detokenizing takes about a microsecond per id.
DECODE_IN_THREAD_IDS = 1024

Made = TypeVar("Made")


async def check_rates(
    pool: ModelPool, request: inference_pb2.GenerateRequest, context: resume_pb2.RouterContext, allowed: TenantLimits
) -> None:
    """Raises `RequestError` RATE_LIMITED if the ledger would refuse the request for its tenant's rates, whose limits
    are `allowed`. If there is nothing to tokenize, the check is left to the submit."""
    if request.HasField("token_ids"):
        return
    num_tokens = least_prompt_tokens(pool.text, request) + (request.stopping.max_tokens or 1)
    refused = await pool.dispatcher.check_rates(
        context.tenant, allowed, max(1, context.num_choices) * num_tokens, ledger_id(context.tenant, context.request_id)
    )
    if refused is not None:
        raise refusal(refused)


async def take_rates(dispatcher: Dispatcher, tenant: str, allowed: TenantLimits) -> None:
    """Takes a request of no tokens from a tenant's rates. Raises `RequestError` RATE_LIMITED."""
    if allowed.requests_per_s is None:
        return
    refused = await dispatcher.check_rates(tenant, allowed, 0, takes=True)
    if refused is not None:
        raise refusal(refused)


def least_prompt_tokens(text: TextModel, request: inference_pb2.GenerateRequest) -> int:
    """Returns the fewest tokens that the text or chat of a request can have, if the chat template keeps every
    message."""
    if request.HasField("chat"):
        said = "".join(part.text for message in request.chat.messages for part in message.content)
    else:
        said = prompt_text(request)
    num_tokens = text.least_tokens(said)
    return min(num_tokens, request.truncate_prompt_tokens or num_tokens)


def shown_chat(request: inference_pb2.GenerateRequest) -> inference_pb2.Chat:
    """Returns the conversation without functions that the model may not call."""
    if not request.chat.functions or request.tool_choice.mode != inference_pb2.ToolChoice.MODE_NONE:
        return request.chat
    shown = inference_pb2.Chat()
    shown.CopyFrom(request.chat)
    shown.ClearField("functions")
    return shown


def prompt_text(request: inference_pb2.GenerateRequest) -> str:
    """Returns the text of a prompt that is text."""
    return request.text_bytes.decode() if request.HasField("text_bytes") else request.text


class Tokenizing:
    """Turns prompts into tokens and tokens into text, for all models."""

    def __init__(self, turns: TokenizerTurns | None = None) -> None:
        self._turns = turns or TokenizerTurns()

    async def encode_prompt(
        self, text: TextModel, request: inference_pb2.GenerateRequest, limits: ModelLimits, tenant: str
    ) -> list[int]:
        """Returns the token ids of a request's prompt. Raises `RequestError`, also for a text that certainly has too
        many tokens."""
        if request.HasField("token_ids"):
            return list(request.token_ids.ids)
        most = MAX_CONTEXTS * limits.context_length if request.truncate_prompt_tokens else limits.context_length - 1
        if request.HasField("chat"):
            return await self.encode_chat(text, shown_chat(request), most, tenant)
        field = "text_bytes" if request.HasField("text_bytes") else "text"
        return await self.encode_text(text, prompt_text(request), most, tenant, field=field)

    async def encode_text(
        self,
        text: TextModel,
        said: str,
        most: int,
        tenant: str,
        *,
        field: str = "text",
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Returns the token ids of a text. Raises `RequestError`, which names `field`, for a text that certainly has
        more than `most` tokens."""

        def encode_now() -> list[int]:
            text.check_length(said, most, field)
            return text.encode(said, add_special_tokens=add_special_tokens)

        return await self._encode(tenant, len(said), encode_now)

    async def encode_chat(
        self, text: TextModel, chat: inference_pb2.Chat, most: int, tenant: str, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Returns the token ids of a conversation. Raises `RequestError`, also if it certainly has more than `most`
        tokens."""

        def encode_now() -> list[int]:
            return text.encode_chat(chat, most_tokens=most, add_generation_prompt=add_generation_prompt)

        return await self._encode(tenant, chat.ByteSize(), encode_now)

    async def encode_bad_words(
        self, text: TextModel, sampling: types_pb2.SamplingParams, vocabulary_size: int, tenant: str
    ) -> None:
        """Adds the token sequences of `bad_words` to the parameters. Raises `RequestError`."""

        def encode_now() -> list[tuple[int, ...]]:
            return bad_word_sequences(text, sampling.bad_words, vocabulary_size)

        if sampling.bad_words:
            num_characters = 2 * sum(len(word) + CHARACTERS_PER_CALL for word in sampling.bad_words)
            add_bad_word_ids(sampling, await self._encode(tenant, num_characters, encode_now))

    async def _encode(self, tenant: str, num_characters: int, encode_now: Callable[[], Made]) -> Made:
        if num_characters <= ENCODE_IN_THREAD_CHARACTERS:
            return encode_now()
        return await self._turns.run(tenant, num_characters, encode_now)

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


def add_bad_word_ids(sampling: types_pb2.SamplingParams, of_words: Iterable[tuple[int, ...]]) -> None:
    """Adds token sequences to `bad_word_ids`, each once. Raises `RequestError` if there are too many."""
    sequences = tuple(dict.fromkeys((*(tuple(one.ids) for one in sampling.bad_word_ids), *of_words)))
    counts = (
        (len(sequences), "token sequences", MAX_BAD_WORD_SEQUENCES),
        (sum(map(len, sequences)), "token ids", MAX_BAD_WORD_IDS),
    )
    for count, what, most in counts:
        if count > most:
            text = f"has {count} {what} together with bad_word_ids; at most {most} are allowed"
            raise invalid(FieldViolation("sampling.bad_words", text))
    sampling.ClearField("bad_word_ids")
    sampling.bad_word_ids.extend(types_pb2.TokenSequence(ids=ids) for ids in sequences)
