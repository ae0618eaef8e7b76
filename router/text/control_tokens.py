"""The control tokens of a model, and prompts in which only its template has written any.

A control token is an added token that is special, that the tokenizer lists as one for chats (`chat_control_tokens`), or
that the template writes around messages. Other added tokens, often `<think>` and `<tool_call>`, belong to what the
model says and stay tokens wherever they stand.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from inflight.common.errors import FieldViolation, invalid
from inflight.router.text.marking import MarkedText

Span = tuple[int, int]


def control_tokens(tokenizer: PreTrainedTokenizerBase, written: Iterable[str]) -> dict[int, AddedToken]:
    """Returns the control tokens by id. `written` are prompts of harmless conversations."""
    added: dict[int, AddedToken] = tokenizer.added_tokens_decoder
    listed = set(getattr(tokenizer, "chat_control_tokens", None) or ())
    used = {
        token_id
        for text in written
        for token_id in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    }
    return {
        token_id: token
        for token_id, token in added.items()
        # Tokens of spaces stand between all words.
        if token.special or token.content in listed or (token_id in used and not token.content.isspace())
    }


def equivalents(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[AddedToken]) -> dict[str, str]:
    """Returns the characters that the tokenizer's normalizer turns into a character of a token, each with that
    character."""
    normalized = [token for token in tokens if token.normalized]
    normalizer = tokenizer.backend_tokenizer.normalizer if isinstance(tokenizer, PreTrainedTokenizerFast) else None
    if not normalized or normalizer is None:
        return {}
    wanted = {character for token in normalized for character in token.content}
    # What is put before every text has no meaning here.
    added = set(normalizer.normalize_str("x")) - {"x"}
    meant = {made: character for character in wanted for made in normalizer.normalize_str(character)}
    found: dict[str, str] = {}
    for character in map(chr, (*range(0x21, 0xD800), *range(0xE000, 0x110000))):
        made = next((c for c in normalizer.normalize_str(character) if c in meant and c not in added), None)
        if made is not None and character not in wanted:
            found[character] = meant[made]
    return found


class MarkedTextEncoder:
    """Encodes marked text so that no control token has a character of the client's.

    What stands between two control tokens is encoded by itself, as always, only by a twin of the tokenizer that knows
    none of them; it shares the vocabulary. In place of those that the template has written it is given fences: added
    tokens whose random names are in no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, controls: dict[int, AddedToken]) -> None:
        self._tokenizer = tokenizer
        self._controls = controls
        self._twin: _Twin | None = None
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            self._twin = _Twin(tokenizer.backend_tokenizer, controls, tokenizer.unk_token_id)

    def encode(self, rendered: MarkedText, field: str) -> list[int]:
        """Returns the token ids. Raises `RequestError` naming `field` if text cannot be told from a control token."""
        text, marked = rendered.text, rendered.marked
        if marked is None:
            return self._ids(text)
        if self._twin is None:
            return self._encode_alone(text, marked, field)
        ids, spans = self._encode_with_spans(text)
        if all(text[begin:end] == marked[begin:end] for _, (begin, end) in spans):
            return ids
        _, spans = self._encode_with_spans(marked)
        return self._twin.encode(text, spans, field)

    def _ids(self, text: str) -> list[int]:
        # `verbose` would warn about text longer than the model's context, which is the validation's business.
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, Span]]]:
        """Returns the ids of text, and its control tokens with the characters that they were made of."""
        # `transformers` would make a list of every token's characters.
        encoding = _encoded(self._tokenizer.backend_tokenizer, text)
        ids: list[int] = encoding.ids
        spans = ((ids[i], encoding.token_to_chars(i)) for i, token_id in enumerate(ids) if token_id in self._controls)
        found = [(token_id, span) for token_id, span in spans if span is not None]
        return ids, [(token_id, span) for token_id, span in found if self._is_written(token_id, text, span)]

    def _is_written(self, token_id: int, text: str, span: Span) -> bool:
        """The unknown token also stands for text that the model has no other token for."""
        is_unknown = token_id == self._tokenizer.unk_token_id
        return not is_unknown or text[span[0] : span[1]].strip() == self._controls[token_id].content

    def _encode_alone(self, text: str, marked: str, field: str) -> list[int]:
        """Encodes text alone. A tokenizer of which only `__call__` is known cannot be told what to treat as text."""
        for token in self._controls.values():
            if text.count(token.content) != marked.count(token.content):
                raise _cannot_encode(token.content, field)
        return self._ids(text)


class _Twin:
    """A tokenizer without control tokens, on the same vocabulary."""

    def __init__(self, backend: Tokenizer, controls: dict[int, AddedToken], unknown_id: int | None) -> None:
        self._backend = backend
        # Text without a token is the unknown token, wherever it stands.
        self._control_ids = frozenset(controls) - {unknown_id}
        self._tokenizer = Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._tokenizer.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._tokenizer.pre_tokenizer = backend.pre_tokenizer
        added = {id_: token for id_, token in backend.get_added_tokens_decoder().items() if id_ not in controls}
        self._avoid_ids_of_the_model()
        self._tokenizer.add_tokens(list(added.values()))
        self._own_ids = {self._tokenizer.token_to_id(token.content): token_id for token_id, token in added.items()}
        self._fences = {is_normalized: self._add_fence(is_normalized) for is_normalized in (False, True)}
        self._fence_ids = frozenset(self._tokenizer.token_to_id(name) for name in self._fences.values())
        self._fence_of = {token_id: self._fences[token.normalized] for token_id, token in controls.items()}

    def encode(self, text: str, written: Sequence[tuple[int, Span]], field: str) -> list[int]:
        """Returns the ids of text in which these control tokens stand at these places, and no other control token
        occurs."""
        pieces, at = [], 0
        for token_id, (begin, end) in written:
            pieces += [text[at:begin], self._fence_of[token_id]]
            at = end
        encoding = _encoded(self._tokenizer, "".join([*pieces, text[at:]]))
        control_ids = iter([token_id for token_id, _ in written])
        ids: list[int] = []
        for token_id in encoding.ids:
            if token_id in self._fence_ids:
                ids.append(next(control_ids))
                continue
            own_id = self._own_ids.get(token_id, token_id)
            # Some models find their control tokens in plain text too.
            ids += self._spell(own_id, field) if own_id in self._control_ids else [own_id]
        assert next(control_ids, None) is None, "a fence was lost"
        return ids

    def _spell(self, token_id: int, field: str) -> list[int]:
        """Returns the ids of a control token's text, character by character."""
        name = self._backend.id_to_token(token_id)
        assert name is not None
        ids = [token.id for character in name for token in self._backend.model.tokenize(character)]
        if not self._control_ids.isdisjoint(ids):
            raise _cannot_encode(name, field)
        return ids

    def _avoid_ids_of_the_model(self) -> None:
        """Added tokens are numbered from the number of pieces, which is the id of a piece if ids have gaps."""
        model_ids = self._tokenizer.get_vocab(with_added_tokens=False).values()
        for _ in range(max(model_ids, default=-1) + 1 - len(model_ids)):
            self._add_fence(is_normalized=False)

    def _add_fence(self, is_normalized: bool) -> str:
        # Letters and digits, which no normalizer changes; 128 bits, which no client guesses.
        name = f"fence{secrets.token_hex(16)}"
        self._tokenizer.add_tokens([AddedToken(name, normalized=is_normalized, special=False)])
        return name


def _encoded(tokenizer: Tokenizer, text: str) -> Encoding:
    # `Tokenizer.encode` holds the interpreter lock, `encode_batch` releases it.
    (encoding,) = tokenizer.encode_batch([text], add_special_tokens=False)
    return encoding


def _cannot_encode(token: str, field: str) -> Exception:
    text = f"has the text of the control token {token!r}, which this model's tokenizer cannot encode as text"
    return invalid(FieldViolation(field, text))
