"""Text and conversations to token ids and back, for one model.

Wraps a loaded `transformers` tokenizer, which is never changed after construction, so that threads may share it. Never
loads anything, never truncates. All methods block. Encoding takes time in proportion to the text, about a millisecond
per `ENCODE_IN_THREAD_CHARACTERS`; for longer text an event loop calls `encode` and `encode_chat` through
`asyncio.to_thread`. The tokenizer releases the interpreter lock.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from google.protobuf import struct_pb2
from transformers import PreTrainedTokenizerBase

from inflight.common.errors import FieldViolation, invalid
from inflight.router.constraint.json_text import read_json
from inflight.router.text.chat_checks import chat_violations
from inflight.router.text.control_tokens import MarkedTextEncoder, control_tokens, equivalents
from inflight.router.text.count_limits import MAX_VIOLATIONS
from inflight.router.text.detokenizer import (
    IncrementalDetokenizer,
    PieceDetokenizer,
    WindowDetokenizer,
    read_pieces,
    special_token_ids,
)
from inflight.router.text.marking import MarkedText, Marker, TemplateInput
from inflight.router.text.roles import USUAL_ROLES, Messages, role_violations, supported_roles, written_prompts
from inflight.router.text.token_bound import read_bound
from inflight.router.tools.support import (
    ToolSettings,
    ToolSupport,
    find_support,
    history,
    markers_of,
    template_function,
    with_tool_prompt,
)
from inflight.v1 import inference_pb2

ENCODE_IN_THREAD_CHARACTERS = 2048
# No word begins or ends with it, so that tokens of words do not contain it.
LINE_END = "\n"
MAX_UTF8_BYTES = 4
# Characters of a template's error; templates may quote whole messages.
MAX_COMPLAINT_CHARACTERS = 300
# Tokens of a prompt in which the tag at its end is found.
NUM_END_TOKENS = 16
# Where most templates take the reasoning of a message.
REASONING_KEY = "reasoning_content"


class TextModel:
    """The text side of a model. `allow_special_tokens_in_chat` lets the texts of conversations contain control
    tokens."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        allow_special_tokens_in_chat: bool = False,
        tools: ToolSettings | None = None,
    ) -> None:
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
        self._support = find_support(templates, self._probe_tools, tools or ToolSettings())
        self._marker_ids = self._special_markers()
        self._marked_pieces = self._pieces and self._pieces.showing(frozenset(self._marker_ids.values()))

    def _special_markers(self) -> dict[str, int]:
        """Returns the ids of the tokens in markers of calls and reasoning that a grammar must write by id: special
        tokens, added tokens between angle brackets, which llguidance takes for special, and markers that are added
        tokens."""
        markers = markers_of(self._support)
        added = {str(token): token_id for token_id, token in self._tokenizer.added_tokens_decoder.items()}
        special = dict(zip(self.token_names(list(self._special_token_ids)), self._special_token_ids, strict=True))
        tagged = {text: token_id for text, token_id in added.items() if text.startswith("<") and text.endswith(">")}
        whole = {text: token_id for text, token_id in added.items() if text in markers}
        parts = special | tagged
        return {text: token_id for text, token_id in parts.items() if any(text in one for one in markers)} | whole

    @property
    def support(self) -> ToolSupport:
        """What the model supports of tools and reasoning."""
        return self._support

    @property
    def marker_ids(self) -> Mapping[str, int]:
        """The tokens of markers of calls and reasoning that are written by id."""
        return self._marker_ids

    @property
    def can_end_reasoning(self) -> bool:
        """Whether the end of the model's reasoning is a token, which can be forced."""
        reasoning = self._support.reasoning
        return reasoning is not None and any(reasoning.end.startswith(token) for token in self._marker_ids)

    def opens_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Returns whether a prompt ends within reasoning, which its template has opened."""
        reasoning = self._support.reasoning
        if reasoning is None:
            return False
        end = self.decode(prompt_ids[-NUM_END_TOKENS:], skip_special_tokens=False)
        return end.rstrip().endswith(reasoning.begin)

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids that have a token."""
        return len(self._tokenizer)

    @property
    def num_base_tokens(self) -> int:
        """Number of token ids without those of added tokens."""
        return int(self._tokenizer.vocab_size)

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
        self,
        chat: inference_pb2.Chat,
        *,
        field: str = "chat",
        most_tokens: int | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Returns the token ids of a conversation, by default ready for the assistant's answer. Raises `RequestError`
        naming `field`; for a conversation that certainly has more than `most_tokens`, before tokenizing it."""
        rendered = self._render(chat, field, add_generation_prompt)
        if most_tokens is not None:
            self.check_length(rendered.text, most_tokens, field)
        # The template writes the special tokens itself.
        return self._encoder.encode(rendered, field)

    def render_chat(self, chat: inference_pb2.Chat, *, field: str = "chat") -> str:
        """Returns the prompt that the model's template makes of a conversation. Raises `RequestError` naming
        `field`."""
        return self._render(chat, field).text

    def _render(self, chat: inference_pb2.Chat, field: str, add_generation_prompt: bool = True) -> MarkedText:
        if not self.has_chat_template:
            raise invalid(FieldViolation(field, "the model has no chat template; send `text` or `token_ids`"))
        wrong = itertools.chain(chat_violations(chat, field), role_violations(chat, self._roles, field))
        if violations := tuple(itertools.islice(wrong, MAX_VIOLATIONS)):
            raise invalid(*violations)
        given = self._template_input(chat, field, add_generation_prompt)
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
            given.messages,
            tools=given.tools,
            add_generation_prompt=given.add_generation_prompt,
            tokenize=False,
            **given.variables,
        )
        assert isinstance(rendered, str)
        return rendered

    def _template_input(self, chat: inference_pb2.Chat, field: str, add_generation_prompt: bool) -> TemplateInput:
        """Returns what the template gets. Raises `RequestError` for what it has no place for."""
        support = self._support
        messages, tools = template_messages(chat), template_tools(chat)
        if support.reasoning is not None and support.reasoning.key != REASONING_KEY:
            messages = [_with_reasoning_as(support.reasoning.key, message) for message in messages]
        effort = support.effort_variables(chat.reasoning_effort)
        is_limited = chat.HasField("thinking_token_budget")
        if is_limited and support.reasoning is not None and not self.can_end_reasoning:
            text = f"is set, but {support.reasoning.end}, the end of the model's reasoning, is not one token"
            raise invalid(FieldViolation(f"{field}.thinking_token_budget", text))
        if chat.functions and support.tools is None:
            text = "the router does not know in which format the model calls tools; its operator can set it"
            if not support.in_template:
                text = "the model's chat template has no tools, and this router writes no system message about them"
            raise invalid(FieldViolation(f"{field}.functions", text))
        if chat.functions or support.shows_calls:
            messages = history(messages, support)
        if chat.functions:
            functions = [_template_function(one) for one in chat.functions]
            if support.in_template:
                tools = functions
            else:
                messages = with_tool_prompt(messages, functions, support)
        return TemplateInput(messages, tools, plain_struct(chat.template_kwargs) | effort, add_generation_prompt)

    def _probe_tools(self, messages: Messages, tools: list[Any]) -> str:
        return self._apply_template(TemplateInput(messages, tools, {}))

    def _probe(self, messages: Messages) -> str:
        rendered = self._tokenizer.apply_chat_template(messages, tokenize=False)
        assert isinstance(rendered, str)
        return rendered

    def token_names(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the name of each token in the vocabulary, which may write a space as another character."""
        names = self._tokenizer.convert_ids_to_tokens(list(token_ids))
        assert isinstance(names, list)
        return names

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

    def detokenizer(self, *, skip_special_tokens: bool = True, shows_markers: bool = False) -> IncrementalDetokenizer:
        """Returns a detokenizer for one choice. With `shows_markers` the text has the markers of calls and reasoning,
        even if they are special tokens."""
        if self._pieces is not None:
            pieces = self._marked_pieces if shows_markers and self._marked_pieces else self._pieces
            return PieceDetokenizer(pieces, skip_special_tokens=skip_special_tokens)
        skipped = self._special_token_ids if skip_special_tokens else frozenset()
        if shows_markers and self._marker_ids:
            skipped, skip_special_tokens = skipped - set(self._marker_ids.values()), False
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


# Conversations --------------------------------------------------------------------------------------------------------


def template_messages(chat: inference_pb2.Chat) -> list[dict[str, Any]]:
    """Returns the messages in the form that chat templates take. The conversation must have no violations."""
    return [_template_message(message) for message in chat.messages]


def template_tools(chat: inference_pb2.Chat) -> list[Any] | None:
    """Returns the tools in the form that chat templates take, each a dict; None without tools, as templates expect."""
    return [plain_struct(tool) for tool in chat.tools] or None


def plain_struct(struct: struct_pb2.Struct) -> dict[str, Any]:
    """Returns a Struct as plain Python values. Its numbers are doubles; whole ones become integers, as in JSON."""
    return {name: _plain(value) for name, value in struct.fields.items()}


def _plain(value: struct_pb2.Value) -> Any:
    match value.WhichOneof("kind"):
        case "struct_value":
            return plain_struct(value.struct_value)
        case "list_value":
            return [_plain(element) for element in value.list_value.values]
        case "number_value":
            number = value.number_value
            return int(number) if number.is_integer() else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case _:
            return None


def _template_message(message: inference_pb2.ChatMessage) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": "".join(part.text for part in message.content)}
    if message.name:
        made["name"] = message.name
    if message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        made[REASONING_KEY] = message.reasoning
    if message.tool_calls:
        made["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    return made


def _template_function(function: inference_pb2.Function) -> dict[str, Any]:
    parameters = read_json(function.parameters) if function.parameters else None
    return template_function(function.name, function.description, parameters)


def _with_reasoning_as(key: str, message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with its reasoning under another key, unless it has content: gpt-oss's template takes only one
    of them."""
    if REASONING_KEY not in message or message["content"]:
        return message
    return {key if name == REASONING_KEY else name: value for name, value in message.items()}


def _template_call(call: inference_pb2.ToolCall) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
    if call.id:
        made["id"] = call.id
    return made


def _arguments(call: inference_pb2.ToolCall) -> dict[str, Any]:
    """Returns the parsed arguments, as templates expect. Text that is not a JSON object, such as arguments that were
    cut off at `max_tokens`, or is nested too deeply, is replaced by an empty object: templates take nothing else."""
    try:
        arguments = read_json(call.arguments or "{}")
        # JSON can escape half a surrogate pair, which UTF-8 text cannot hold.
        json.dumps(arguments, ensure_ascii=False).encode()
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}
