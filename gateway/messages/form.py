"""Anthropic's form of a chat's answer, whole and as events of a stream, and of errors. Pure.

A chat's chunks go in, one after another, and events come out. The content is a list of blocks, of which the last one is
open: thinking, a text, or a call of a tool.

A chunk may become several events, and a client may have received some of them. The id of an event is that of the last
chunk that the client has whole, and after `!` what it has besides: the number of blocks, which of them is open, and how
many characters of the output after that chunk. The beginning of a call counts as one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

from inflight.gateway.answers import named_event, not_enforced
from inflight.gateway.errors import ApiError
from inflight.gateway.event_ids import no_event_id
from inflight.gateway.messages.bodies import Converted, MessagesBody

# What is open: a block, or thinking of which only the end is missing.
Kind = Literal["thinking", "signed", "text", "tool_use"]
# The letter of the open block in an id; after the last event but `message_stop` it is `e`.
_LETTERS: dict[Kind | None, str] = {None: "n", "thinking": "h", "signed": "s", "text": "t", "tool_use": "u"}
_END = "e"
_STATE = re.compile(r"([0-9]{1,6})([nhstue])([0-9]{1,9})")

# Anthropic's status for a server that takes no more work now, which its clients retry.
OVERLOADED = 529
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
# Refusals for the server's load. A tenant's own rate limit stays 429.
_OF_LOAD = frozenset({"queue_full", "deadline_unmeetable", "busy", "draining", "no_executor", "unavailable"})


def of_messages(error: ApiError) -> tuple[int, dict[str, Any]]:
    """Returns the status and the body of an error."""
    status = OVERLOADED if error.code in _OF_LOAD else error.status
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return status, {"type": "error", "error": {"type": kind, "message": error.text}}


class MessageForm:
    def __init__(self, body: MessagesBody, converted: Converted) -> None:
        self._shows_thinking = body.shows_thinking
        self._converted = converted
        self._opening: dict[str, Any] | None = None
        self._has_begun = False
        self._prompt = {"input_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        self._open: Kind | None = None
        self._num_blocks = 0
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._is_over = False
        # The id of the last chunk that the client has whole, the characters after it that it has, and those among the
        # next ones that it has already.
        self._name = ""
        self._num_after = 0
        self._num_known = 0

    def resume(self, last_id: str) -> str:
        """Continues after an event of an earlier stream. Returns the id of the chat's chunk. Raises `ApiError`."""
        name, _, state = last_id.rpartition("!")
        found = _STATE.fullmatch(state)
        if found is None:
            raise no_event_id()
        self._name, self._has_begun, self._is_over = name, True, found[2] == _END
        self._num_blocks = int(found[1])
        self._open = next((kind for kind, letter in _LETTERS.items() if letter == found[2]), None)
        self._num_after = self._num_known = int(found[3])
        return name

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Returns the message for a whole chat completion."""
        (choice,) = answer["choices"]
        said = choice["message"]
        content: list[dict[str, Any]] = []
        if thinking := _reasoning(said):
            shown = thinking if self._shows_thinking else ""
            content.append({"type": "thinking", "thinking": shown, "signature": _signature(answer)})
        if said["content"]:
            content.append({"type": "text", "text": said["content"]})
        for call in said.get("tool_calls") or ():
            function = call["function"]
            content.append(
                {"type": "tool_use", "id": call["id"], "name": function["name"], "input": _input(function["arguments"])}
            )
        return {**_message(answer), "content": content, **_ended(choice), "usage": _usage(answer["usage"])}

    def started(self, prompt_tokens: int, cached_tokens: int) -> bytes:
        """Returns the first event, which has the counts of the prompt's tokens."""
        self._prompt |= {
            "input_tokens": prompt_tokens - cached_tokens,
            "cache_read_input_tokens": cached_tokens,
        }
        return b"".join(named_event(event, self._id()) for event in self._begun())

    def event(self, chunk: dict[str, Any], name: str) -> bytes:
        events = [(event, self._id(), self._num_after) for event in self._events(chunk)]
        # The end is told again to a client that has not had all of it.
        if any(choice["finish_reason"] is not None for choice in chunk["choices"]) or chunk["usage"] is not None:
            return b"".join(named_event(event, one) for event, one, _ in events)
        num_in_all, self._name, self._num_after = self._num_after, name, self._num_known
        return b"".join(named_event(event, self._id() if num == num_in_all else one) for event, one, num in events)

    def _id(self) -> str:
        letter = _END if self._is_over else _LETTERS[self._open]
        return f"{self._name}!{self._num_blocks}{letter}{self._num_after}" if self._name else ""

    def waiting(self, reason: str) -> bytes:
        """Returns an event for a time without output. Its clients ignore it."""
        return named_event({"type": "ping"})

    def failure(self, error: ApiError) -> bytes:
        """Returns the event for an error in the middle of a stream."""
        return named_event(of_messages(error)[1])

    def refusal(self, error: ApiError) -> ApiError:
        """Returns the error with the names of this API."""
        return self._converted.restored(error)

    def end(self) -> bytes:
        """Returns what follows the last event."""
        return named_event({"type": "message_stop"})

    def _events(self, chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._opening is None and not self._has_begun:
            # Written when the request has started, or its first output is there.
            self._opening = chunk
            return
        if self._is_over:
            return
        yield from self._begun()
        for choice in chunk["choices"]:
            yield from self._delta(choice["delta"], chunk)
            if choice["finish_reason"] is not None:
                yield from self._closed(chunk)
                self._end = _ended(choice)
        if chunk["usage"] is not None:
            self._is_over = True
            yield {"type": "message_delta", "delta": self._end, "usage": _usage(chunk["usage"])}

    def _begun(self) -> Iterator[dict[str, Any]]:
        if self._has_begun or self._opening is None:
            return
        self._has_begun = True
        message = {**_message(self._opening), "content": [], **self._end, "usage": {**self._prompt, "output_tokens": 0}}
        yield {"type": "message_start", "message": message}

    def _delta(self, delta: dict[str, Any], chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if thinking := self._unknown(_reasoning(delta)):
            yield from self._opened("thinking", {"thinking": "", "signature": ""}, chunk)
            self._num_after += len(thinking)
            if self._shows_thinking:
                yield self._more({"type": "thinking_delta", "thinking": thinking})
        if text := self._unknown(delta.get("content", "")):
            yield from self._opened("text", {"text": ""}, chunk)
            self._num_after += len(text)
            yield self._more({"type": "text_delta", "text": text})
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            if "id" in call and self._unknown("{"):
                yield from self._closed(chunk)
                self._num_after += 1
                yield from self._opened("tool_use", {"id": call["id"], "name": function["name"], "input": {}}, chunk)
            if arguments := self._unknown(function["arguments"]):
                self._num_after += len(arguments)
                yield self._more({"type": "input_json_delta", "partial_json": arguments})

    def _unknown(self, text: str) -> str:
        """Returns the part of a text that the client does not have."""
        num_known = min(self._num_known, len(text))
        self._num_known -= num_known
        return text[num_known:]

    def _opened(self, kind: Kind, fields: dict[str, Any], chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._open == kind:
            return
        yield from self._closed(chunk)
        self._open = kind
        self._num_blocks += 1
        yield self._of_block("content_block_start", content_block={"type": kind, **fields})

    def _closed(self, chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Ends the open block, if there is one."""
        if self._open is None:
            return
        if self._open == "thinking":
            self._open = "signed"
            yield self._more({"type": "signature_delta", "signature": _signature(chunk)})
        self._open = None
        yield self._of_block("content_block_stop")

    def _more(self, delta: dict[str, Any]) -> dict[str, Any]:
        return self._of_block("content_block_delta", delta=delta)

    def _of_block(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": self._num_blocks - 1, **fields}


def _message(answer: dict[str, Any]) -> dict[str, Any]:
    name = answer["id"].partition("-")[2]
    made = {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": answer["model"]}
    return made | not_enforced(answer)


def _reasoning(said: dict[str, Any]) -> str:
    text: str = said.get("reasoning_content") or said.get("reasoning") or ""
    return text


def _signature(answer: dict[str, Any]) -> str:
    """Returns the signature of a block of thinking. It says nothing: what clients send back is not checked."""
    return base64.b64encode(hashlib.sha256(answer["id"].encode()).digest()).decode()


def _input(arguments: str) -> Any:
    """Returns the arguments of a call; none if `max_tokens` cut them off."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {}


def _ended(choice: dict[str, Any]) -> dict[str, Any]:
    stop = choice.get("stop_reason")
    reason = "stop_sequence" if stop is not None else _STOP_REASONS[choice["finish_reason"]]
    return {"stop_reason": reason, "stop_sequence": stop}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
