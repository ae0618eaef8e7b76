"""The Responses API's form of a chat's answer, whole and as events of a stream. Pure.

A chat's chunks go in, one after another, and events come out. The whole answer is the response that its one chunk ends
with. The output is a list of items: a message is one, with a single part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.answers import encoded
from gateway.errors import ApiError
from gateway.responses.bodies import Names, ResponsesBody

Status = Literal["in_progress", "completed", "incomplete", "failed"]


@dataclass(slots=True)
class _Message:
    """The message of the output as far as it has come."""

    item_id: str
    output_index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        """Fields of every event about its part."""
        return {"item_id": self.item_id, "output_index": self.output_index, "content_index": 0}

    def part(self) -> dict[str, Any]:
        """Returns its part."""
        return {
            "type": "output_text",
            "text": "".join(self.texts),
            "annotations": [],
            "logprobs": self.logprobs,
        }

    def item(self, status: Status, *, is_new: bool = False) -> dict[str, Any]:
        """Returns the item; a new one has no part yet."""
        content = [] if is_new else [self.part()]
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}


class ResponseForm:
    """The form of one response."""

    def __init__(self, body: ResponsesBody, names: Names) -> None:
        self._body = body
        self._names = names
        self._number = 0  # of the next event
        self._id = ""
        self._created = 0
        self._message: _Message | None = None
        self._output: list[dict[str, Any]] = []
        self._status: Status = "in_progress"

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Returns the response for a whole chat completion."""
        (choice,) = answer["choices"]
        delta = {**choice, "delta": choice["message"]}
        for _ in self._events({**answer, "choices": [delta], "usage": None}):
            pass
        return self._response(answer["usage"])

    def event(self, chunk: dict[str, Any], name: str) -> bytes:
        """Returns the events for a chunk. `name` is unused: a response cannot be resumed."""
        return b"".join(map(_sent, self._events(chunk)))

    def failure(self, error: ApiError) -> bytes:
        """Returns the event for an error in the middle of a stream."""
        self._status = "failed"
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response = self._response(None) | {"error": {"code": code, "message": error.text}}
        return _sent(self._made("response.failed", response=response))

    def refusal(self, error: ApiError) -> ApiError:
        """Returns the error with the names of this API."""
        return self._names.restored(error)

    def end(self) -> bytes:
        """Returns what follows the last event."""
        return b""

    def _events(self, chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if not self._id:
            self._id = chunk["id"].partition("-")[2]
            self._created = chunk["created"]
            for kind in ("response.created", "response.in_progress"):
                yield self._made(kind, response=self._response(None))
        for choice in chunk["choices"]:
            logprobs = (choice["logprobs"] or {}).get("content") or []
            yield from self._text(choice["delta"].get("content") or "", logprobs)
            if choice["finish_reason"] is not None:
                yield from self._finished(choice["finish_reason"])
        if chunk["usage"] is not None:
            yield self._made(f"response.{self._status}", response=self._response(chunk["usage"]))

    def _text(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        if not (text or logprobs):
            return
        if self._message is None:
            yield from self._opened()
        assert self._message is not None
        self._message.texts.append(text)
        self._message.logprobs.extend(logprobs)
        yield self._made("response.output_text.delta", **self._message.place, delta=text, logprobs=logprobs)

    def _opened(self) -> Iterator[dict[str, Any]]:
        message = self._message = _Message(f"msg_{self._id}", len(self._output))
        item = message.item("in_progress", is_new=True)
        yield self._made("response.output_item.added", output_index=message.output_index, item=item)
        yield self._made("response.content_part.added", **message.place, part=message.part())

    def _finished(self, reason: str) -> Iterator[dict[str, Any]]:
        self._status = "incomplete" if reason == "length" else "completed"
        if self._message is None:
            yield from self._opened()
        assert self._message is not None
        message, part = self._message, self._message.part()
        texts = {"text": part["text"], "logprobs": part["logprobs"]}
        yield self._made("response.output_text.done", **message.place, **texts)
        yield self._made("response.content_part.done", **message.place, part=part)
        item = message.item(self._status)
        self._output.append(item)
        self._message = None
        yield self._made("response.output_item.done", output_index=message.output_index, item=item)

    def _made(self, kind: str, **fields: Any) -> dict[str, Any]:
        number = self._number
        self._number += 1
        return {"type": kind, "sequence_number": number, **fields}

    def _response(self, usage: dict[str, Any] | None) -> dict[str, Any]:
        """Returns the response as far as it has come."""
        is_cut = self._status == "incomplete"
        unfinished = [] if self._message is None else [self._message.item("incomplete")]
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [*self._output, *unfinished],
            "usage": None if usage is None else _usage(usage),
            **_asked(self._body),
        }


def _asked(body: ResponsesBody) -> dict[str, Any]:
    """Returns the parameters that a response repeats. What was left out is the model's default, which has no number
    here."""
    text_format = {"type": "text"} if body.text is None or body.text.format is None else _dumped(body.text.format)
    repeated = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "temperature", "top_p", "user")
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "model": body.model,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "text": {"format": text_format},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        **{name: body.shared.get(name) for name in repeated},
        "metadata": body.shared.get("metadata") or {},
    }


def _dumped(model: Any) -> dict[str, Any]:
    return dict(model.model_dump(by_alias=True, exclude_none=True))


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }


def _sent(event: dict[str, Any]) -> bytes:
    return b"event: " + event["type"].encode() + b"\ndata: " + encoded(event) + b"\n\n"
