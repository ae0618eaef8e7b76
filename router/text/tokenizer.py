"""Text to token ids and back, for one model.

Wraps a loaded `transformers` tokenizer, which is never changed after construction, so that threads may share it. Never
loads anything, never truncates. All methods block. Encoding takes time in proportion to the text, about a millisecond
per `ENCODE_IN_THREAD_CHARACTERS`; for longer text an event loop calls `encode` and `encode_chat` through
`asyncio.to_thread`. The tokenizer releases the interpreter lock.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from common.errors import FieldViolation, invalid
from inflight.v1 import inference_pb2
from router.text.chat import chat_violations, plain_struct, template_messages, template_tools
from router.text.control_tokens import MarkedTextEncoder, control_tokens, equivalents
from router.text.count_limits import MAX_VIOLATIONS
from router.text.detokenizer import IncrementalDetokenizer, PieceDetokenizer, WindowDetokenizer
from router.text.marking import MarkedText, Marker, TemplateInput
from router.text.pieces import read_pieces, special_token_ids
from router.text.roles import USUAL_ROLES, Messages, role_violations, supported_roles, written_prompts
from router.text.token_bound import read_bound

ENCODE_IN_THREAD_CHARACTERS = 2048
# No word begins or ends with it, so that tokens of words do not contain it.
LINE_END = "\n"
MAX_UTF8_BYTES = 4
# Characters of a template's error; templates may quote whole messages.
MAX_COMPLAINT_CHARACTERS = 300


class TextModel:
    """The text side of a model. `allow_special_tokens_in_chat` lets the texts of conversations contain control
    tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, allow_special_tokens_in_chat: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special_token_ids = special_token_ids(tokenizer)
        self._pieces = read_pieces(tokenizer)
        self._bound = read_bound(tokenizer, self._pieces)
        # A stored tokenizer may have settings for truncation and padding. The first call resets them, which must not
        # happen while another thread encodes.
        self.encode("")
        templates = _templates(tokenizer)
        self._roles = supported_roles(self._probe, templates) if templates else USUAL_ROLES
        controls = control_tokens(tokenizer, written_prompts(self._probe) if templates else [])
        self._control_token_ids = frozenset(controls)
        self._encoder = MarkedTextEncoder(tokenizer, controls)
        self._marker: Marker | None = None
        if templates and not allow_special_tokens_in_chat:
            texts = [token.content for token in controls.values()]
            self._marker = Marker(texts, templates, equivalents(tokenizer, controls.values()))

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids that have a token."""
        return len(self._tokenizer)

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` works."""
        return bool(self._tokenizer.chat_template)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids whose text is left out if special tokens are skipped."""
        return self._special_token_ids

    @property
    def control_token_ids(self) -> frozenset[int]:
        """Ids of the tokens that only the chat template may write in a conversation."""
        return self._control_token_ids

    @property
    def unknown_token_id(self) -> int | None:
        """Id of the token for text without any other token."""
        unknown_id: int | None = self._tokenizer.unk_token_id
        return unknown_id

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that messages may have, in order of name."""
        return self._roles

    def least_tokens(self, text: str) -> int:
        """Returns a lower bound on the tokens of the text, without those that the tokenizer puts around a prompt.
        Cheap; 0 for a tokenizer without such a bound."""
        return 0 if self._bound is None else self._bound.least_tokens(text)

    def check_length(self, text: str, most_tokens: int, field: str) -> None:
        """Raises `RequestError` naming `field` for a text that certainly has more tokens."""
        if len(text) * MAX_UTF8_BYTES <= most_tokens:
            return
        least = self.least_tokens(text)
        if least > most_tokens:
            raise invalid(FieldViolation(field, f"has at least {least} tokens; at most {most_tokens} are allowed here"))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of text, with those that the tokenizer puts around a prompt by itself."""
        # `verbose` would warn about text longer than the model's context, which is the validation's business.
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        ids: list[int] = encoded["input_ids"]
        return ids

    @cached_property
    def _line_end_ids(self) -> list[int] | None:
        """None if the tokenizer has no token for it."""
        line_end = self.encode(LINE_END, add_special_tokens=False)
        return None if self.unknown_token_id in line_end else line_end

    def encode_inside(self, text: str) -> list[int]:
        """Returns the token ids of text within an output. Some tokenizers put a space before a text of its own."""
        if self._line_end_ids is not None:
            num_before = len(self._line_end_ids)
            ids = self.encode(LINE_END + text, add_special_tokens=False)
            if ids[:num_before] == self._line_end_ids and len(ids) > num_before:
                return ids[num_before:]
        return self.encode(text, add_special_tokens=False)

    def encode_chat(
        self, chat: inference_pb2.Chat, *, field: str = "chat", most_tokens: int | None = None
    ) -> list[int]:
        """Returns the token ids of a conversation, ready for the assistant's answer. Raises `RequestError` naming
        `field`; for a conversation that certainly has more than `most_tokens`, before tokenizing it."""
        rendered = self._render(chat, field)
        if most_tokens is not None:
            self.check_length(rendered.text, most_tokens, field)
        # The template writes the special tokens itself.
        return self._encoder.encode(rendered, field)

    def render_chat(self, chat: inference_pb2.Chat, *, field: str = "chat") -> str:
        """Returns the prompt that the model's template makes of a conversation. Raises `RequestError` naming
        `field`."""
        return self._render(chat, field).text

    def _render(self, chat: inference_pb2.Chat, field: str) -> MarkedText:
        if not self.has_chat_template:
            raise invalid(FieldViolation(field, "the model has no chat template; send `text` or `token_ids`"))
        wrong = itertools.chain(chat_violations(chat, field), role_violations(chat, self._roles, field))
        if violations := tuple(itertools.islice(wrong, MAX_VIOLATIONS)):
            raise invalid(*violations)
        given = TemplateInput(template_messages(chat), template_tools(chat), plain_struct(chat.template_kwargs))
        try:
            text = self._apply_template(given)
            return MarkedText(text) if self._marker is None else self._marker.mark(given, text, self._apply_template)
        except ImportError:
            raise  # jinja2 is missing or too old: not the client's fault
        except Exception as error:
            # The template is the model's program and the conversation its input: it may raise any exception.
            complaint = str(error)[:MAX_COMPLAINT_CHARACTERS] or type(error).__name__
            raise invalid(FieldViolation(field, f"the model's chat template refuses it: {complaint}")) from error

    def _apply_template(self, given: TemplateInput) -> str:
        rendered = self._tokenizer.apply_chat_template(
            given.messages, tools=given.tools, add_generation_prompt=True, tokenize=False, **given.variables
        )
        assert isinstance(rendered, str)
        return rendered

    def _probe(self, messages: Messages) -> str:
        rendered = self._tokenizer.apply_chat_template(messages, tokenize=False)
        assert isinstance(rendered, str)
        return rendered

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token by itself, special tokens included; none for an id without a token.

        If only `decode` is known, an incomplete character is U+FFFD.
        """
        if self._pieces is not None:
            pieces = self._pieces.pieces
            return pieces[token_id] if token_id < len(pieces) else b""
        if token_id >= self.vocabulary_size:
            return b""
        return self._decode_whole([token_id], skip_special_tokens=False).encode()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids, the same as a stream of them gives. Incomplete characters become U+FFFD."""
        if self._pieces is None:
            return self._decode_whole(list(token_ids), skip_special_tokens)
        detokenizer = PieceDetokenizer(self._pieces, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def detokenizer(self, *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """Returns a detokenizer for one choice."""
        if self._pieces is not None:
            return PieceDetokenizer(self._pieces, skip_special_tokens=skip_special_tokens)
        skipped = self._special_token_ids if skip_special_tokens else frozenset()
        return WindowDetokenizer(lambda ids: self._decode_whole(ids, skip_special_tokens), skipped)

    def _decode_whole(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        # Cleanup of spaces is for training on old corpora: code and quotations must be returned as produced.
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


def _templates(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns all chat templates of a tokenizer, which may have a second one for tools."""
    templates = tokenizer.chat_template
    if isinstance(templates, dict):
        return list(templates.values())
    return [templates] if templates else []
