"""The Responses API's form of a chat's answer, whole and as events of a stream. Pure.

A chat's chunks go in, one after another, and events come out. The whole answer is the response that its one chunk ends
with. The output is a list of items, of which the last one is open: reasoning, a message, or a call of a tool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from inflight.gateway.answers import CommentingForm, named_event, not_enforced
from inflight.gateway.errors import ApiError
from inflight.gateway.responses.bodies import FieldNames, ResponsesBody
from inflight.gateway.responses.tools import CustomTool, InputText

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
Kind = Literal["reasoning", "message", "function_call", "custom_tool_call"]

_ID_PREFIXES: dict[Kind, str] = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}
_CALLS: tuple[Kind, ...] = ("function_call", "custom_tool_call")
# What the deltas of an item are called in the names of events. Items with a part have its type.
_TEXTS: dict[Kind, str] = {
    "reasoning": "reasoning_text",
    "message": "output_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}


@dataclass(slots=True)
class _Item:
    """An item of the output as far as it has come. `call` has what a call's item has besides its text."""

    kind: Kind
    item_id: str
    output_index: int
    call: dict[str, Any] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    input: InputText = field(default_factory=InputText)

    @property
    def has_part(self) -> bool:
        """Whether the text is in a part."""
        return self.kind not in _CALLS

    @property
    def place(self) -> dict[str, Any]:
        """Fields of every event about its text."""
        place = {"item_id": self.item_id, "output_index": self.output_index}
        return place | {"content_index": 0} if self.has_part else place

    @property
    def text(self) -> str:
        """The text, the arguments or the input."""
        return "".join(self.texts)

    def part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _TEXTS[self.kind], "text": self.text}
        return part | {"annotations": [], "logprobs": self.logprobs} if self.kind == "message" else part

    def shown(self, status: Status, *, is_new: bool = False) -> dict[str, Any]:
        """Returns the item; a new one has no part yet."""
        item: dict[str, Any] = {"id": self.item_id, "type": self.kind, "status": status}
        if not self.has_part:
            return item | self.call | {"arguments" if self.kind == "function_call" else "input": self.text}
        item |= {"content": [] if is_new else [self.part()]}
        return item | {"role": "assistant"} if self.kind == "message" else item | {"summary": []}

    def end(self) -> dict[str, Any]:
        """Returns the fields of the event with the whole text."""
        match self.kind:
            case "function_call":
                return {"name": self.call["name"], "arguments": self.text}
            case "custom_tool_call":
                return {"input": self.text}
            case "message":
                return {"text": self.text, "logprobs": self.logprobs}
            case _:
                return {"text": self.text}


class ResponseForm(CommentingForm):
    def __init__(self, body: ResponsesBody, names: FieldNames) -> None:
        self._body = body
        self._names = names
        self._offered = {tool.name: tool for tool in body.offered}
        self._number = 0  # of the next event
        self._id = ""
        self._created = 0
        self._open: _Item | None = None
        self._output: list[dict[str, Any]] = []
        self._status: Status = "in_progress"
        self._not_enforced: dict[str, Any] = {}
        # Of tokens whose text has not come yet.
        self._logprobs: list[dict[str, Any]] = []
        self._usage: dict[str, Any] | None = None
        self._error: dict[str, str] | None = None
        # Whether the response can be retrieved. Known before its last event is made.
        self.is_stored = body.stores

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Returns the response for a whole chat completion."""
        (choice,) = answer["choices"]
        calls = [{"index": index, **call} for index, call in enumerate(choice["message"].get("tool_calls") or ())]
        chunk = {**answer, "choices": [{**choice, "delta": {**choice["message"], "tool_calls": calls}}], "usage": None}
        for _ in self.events(chunk):
            pass
        self._usage = answer["usage"]
        return self.response()

    def event(self, chunk: dict[str, Any], name: str) -> bytes:
        """Returns the events for a chunk. `name` is unused: they are numbered."""
        return b"".join(map(named_event, self.events(chunk)))

    def failure(self, error: ApiError) -> bytes:
        """Returns the event for an error in the middle of a stream."""
        self.failed(error)
        return named_event(self.last())

    def refusal(self, error: ApiError) -> ApiError:
        """Returns the error with the names of this API."""
        return self._names.restored(error)

    def end(self) -> bytes:
        """Returns the last event."""
        return named_event(self.last())

    def queued(self, name: str, created: int) -> Iterator[dict[str, Any]]:
        """Yields the first events of a response that is answered before it has a seat. `name` is its id without the
        prefix."""
        self._id, self._created, self._status = name, created, "queued"
        for kind in ("response.created", "response.queued"):
            yield self._made(kind, response=self.response())

    def failed(self, error: ApiError) -> None:
        """Ends the response by an error."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._status, self._error = "failed", {"code": code, "message": error.text}

    def cancelled(self) -> None:
        """Ends the response because its client has cancelled it."""
        self._status = "cancelled"

    def last(self) -> dict[str, Any]:
        """Returns the last event. There is none of its own for a cancelled response."""
        kind = "failed" if self._status == "cancelled" else self._status
        return self._made(f"response.{kind}", response=self.response())

    def events(self, chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the events for a chunk, all but the last one."""
        if self._status == "queued" or not self._id:
            kinds = ["response.in_progress"] if self._id else ["response.created", "response.in_progress"]
            self._status = "in_progress"
            self._id = chunk["id"].partition("-")[2]
            self._created = chunk["created"]
            self._not_enforced = not_enforced(chunk)
            for kind in kinds:
                yield self._made(kind, response=self.response())
        for choice in chunk["choices"]:
            yield from self._delta(choice["delta"], (choice["logprobs"] or {}).get("content") or [])
            if choice["finish_reason"] is not None:
                yield from self._finished(choice["finish_reason"])
        if chunk["usage"] is not None:
            self._usage = chunk["usage"]

    def _delta(self, delta: dict[str, Any], logprobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        self._logprobs += logprobs
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            yield from self._text("reasoning", reasoning)
        if (content := delta.get("content")) or (self._logprobs and self._is_open("message")):
            yield from self._text("message", content or "")
        for call in delta.get("tool_calls") or ():
            yield from self._call(call)

    def _text(self, kind: Kind, text: str) -> Iterator[dict[str, Any]]:
        if not self._is_open(kind):
            yield from self._opened(kind, {})
        assert self._open is not None
        logprobs: dict[str, Any] = {}
        if kind == "message":
            logprobs = {"logprobs": self._logprobs}
            self._open.logprobs += self._logprobs
            self._logprobs = []
        self._open.texts.append(text)
        yield self._made(f"response.{_TEXTS[kind]}.delta", **self._open.place, delta=text, **logprobs)

    def _call(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if "id" in call:
            yield from self._opened(*self._begun(call["id"], call["function"]["name"]))
        assert self._open is not None
        text = call["function"]["arguments"]
        if self._open.kind == "custom_tool_call":
            text = self._open.input.feed(text)
        if text:
            yield from self._text(self._open.kind, text)

    def _begun(self, call_id: str, name: str) -> tuple[Kind, dict[str, Any]]:
        """Returns the kind of a call, and the fields of its item."""
        tool = self._offered.get(name)
        if tool is None:
            return "function_call", {"call_id": call_id, "name": name}
        namespace = {} if tool.namespace is None else {"namespace": tool.namespace}
        kind: Kind = "custom_tool_call" if isinstance(tool.tool, CustomTool) else "function_call"
        return kind, {"call_id": call_id, "name": tool.tool.name, **namespace}

    def _is_open(self, kind: Kind) -> bool:
        return self._open is not None and self._open.kind == kind

    def _opened(self, kind: Kind, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._closed("completed")
        index = len(self._output)
        self._open = item = _Item(kind, f"{_ID_PREFIXES[kind]}_{self._id}_{index}", index, call)
        shown = item.shown("in_progress", is_new=True)
        yield self._made("response.output_item.added", output_index=index, item=shown)
        if item.has_part:
            yield self._made("response.content_part.added", **item.place, part=item.part())

    def _closed(self, status: Status) -> Iterator[dict[str, Any]]:
        """Ends the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return
        shown = item.shown(status)
        self._output.append(shown)
        yield self._made(f"response.{_TEXTS[item.kind]}.done", **item.place, **item.end())
        if item.has_part:
            yield self._made("response.content_part.done", **item.place, part=item.part())
        yield self._made("response.output_item.done", output_index=item.output_index, item=shown)

    def _finished(self, reason: str) -> Iterator[dict[str, Any]]:
        self._status = "incomplete" if reason == "length" else "completed"
        if self._open is None and not self._output:
            yield from self._text("message", "")
        yield from self._closed(self._status)

    def _made(self, kind: str, **fields: Any) -> dict[str, Any]:
        number = self._number
        self._number += 1
        return {"type": kind, "sequence_number": number, **fields}

    def response(self) -> dict[str, Any]:
        """Returns the response as far as it has come."""
        is_cut = self._status == "incomplete"
        unfinished = [] if self._open is None else [self._open.shown("incomplete")]
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [*self._output, *unfinished],
            "usage": None if self._usage is None else _usage(self._usage),
            **_asked(self._body),
            "store": self.is_stored,
            **self._not_enforced,
        }


def _asked(body: ResponsesBody) -> dict[str, Any]:
    """Returns the parameters that a response repeats. What was left out is the model's default, which has no number
    here."""
    text_format = {"type": "text"}
    if body.text_format is not None:
        text_format = body.text_format.model_dump(by_alias=True, exclude_none=True)
    choice = body.tool_choice or "auto"
    repeated = ("prompt_cache_key", "safety_identifier", "service_tier", "temperature", "top_p", "user")
    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.shared.get("metadata") or {},
        "model": body.model,
        "parallel_tool_calls": body.shared.get("parallel_tool_calls") is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "text": {"format": text_format},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump(exclude={"defer_loading"}) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        **{name: body.shared.get(name) for name in repeated},
    }


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
        **{name: usage[name] for name in ("resources",) if name in usage},
    }
