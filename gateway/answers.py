"""OpenAI's response objects for chats and completions, whole and in chunks. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol

from inflight.catalogue import Model
from inflight.events import (
    Accepted,
    ContentPart,
    Finished,
    FinishReason,
    Part,
    PositionLogprobs,
    ReasoningPart,
    ToolCall,
    ToolCallPart,
    Usage,
)
from inflight.gateway import logprobs as openai_logprobs
from inflight.gateway.conversion import ApiRequest
from inflight.gateway.errors import ApiError, from_end
from inflight.gateway.event_ids import AnswerId

DONE = b"data: [DONE]\n\n"
# Fields that OpenAI's API does not have: tools whose parameters are not enforced, and words of schemas without effect.
UNENFORCED_TOOLS = "unenforced_tools"
IGNORED_WORDS = "ignored_schema_words"

_FINISH: dict[FinishReason, Literal["stop", "length"]] = {
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
}


@dataclass(slots=True)
class FinishedChoice:
    """One complete choice. `text` is without reasoning and calls if it has any. `is_cut`: a stop cut off a call, or the
    form that was asked for. `stop` is the text of `stop` that ended it."""

    text: str
    reason: FinishReason
    logprobs: Sequence[PositionLogprobs | None] = ()
    prompt: Sequence[PositionLogprobs | None] = ()
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    is_cut: bool = False
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Chunks:
    """Makes the chunks of one streamed answer."""

    api_request: ApiRequest
    answer: AnswerId

    def opening(self, index: int, accepted: Accepted | None = None) -> dict[str, Any] | None:
        """Returns the first chunk of a choice; None if that is its text."""
        if self.api_request.kind == "completion":
            return None
        chunk = self._chunk([{"index": index, "delta": {"role": "assistant", "content": ""}, **_UNFINISHED}])
        return chunk | _not_enforced(accepted)

    def text(self, index: int, text: str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns a chunk with text of a choice, and the log probabilities of its tokens."""
        more: dict[str, Any] = {"text": text} if self.api_request.kind == "completion" else {"delta": {"content": text}}
        return self._chunk([{"index": index, **more, **_UNFINISHED, "logprobs": logprobs}])

    def parts(self, index: int, parts: Sequence[Part], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns a chunk with parts of a choice, and the log probabilities of its tokens."""
        return self._chunk([{"index": index, "delta": self._delta(parts), **_UNFINISHED, "logprobs": logprobs}])

    def finished(self, index: int, finished: Finished) -> dict[str, Any]:
        """Returns the last chunk of a choice. Raises `ApiError` for a reason that OpenAI's API does not have."""
        is_cut, num_calls = finished.constraint_unfinished, finished.num_tool_calls
        reason = openai_finish_reason(finished.reason, num_calls, is_cut=is_cut)
        end = {"logprobs": None, "finish_reason": reason, **_matched(finished.stop)}
        if self.api_request.kind == "completion":
            return self._chunk([{"index": index, "text": "", **end}])
        return self._chunk([{"index": index, "delta": self._delta(finished.parts), **end}])

    def _delta(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Returns a chat's delta, with one entry for each call."""
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            match part:
                case ContentPart():
                    delta["content"] = delta.get("content", "") + part.text
                case ReasoningPart():
                    for name in self.api_request.reasoning_fields:
                        delta[name] = delta.get(name, "") + part.text
                case ToolCallPart() if part.index in calls:
                    calls[part.index]["function"]["arguments"] += part.arguments
                case ToolCallPart():
                    calls[part.index] = _begun_call(part)
        return delta | {"tool_calls": list(calls.values())} if calls else delta

    def usage(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """Returns the token counts, which are sent last if requested."""
        return self._chunk([]) | {"usage": usage_of(self.api_request, usages)}

    def with_running_usage(
        self, chunk: dict[str, Any], prompt_tokens: Sequence[int], output_tokens: int
    ) -> dict[str, Any]:
        """Adds the token counts so far to a chunk, if requested. `prompt_tokens` are those of each choice."""
        if not self.api_request.includes_running_usage or chunk["usage"] is not None:
            return chunk
        prompts = sum(prompt_tokens[:: self.api_request.n])
        running = {
            "prompt_tokens": prompts,
            "completion_tokens": output_tokens,
            "total_tokens": prompts + output_tokens,
        }
        return chunk | {"usage": running}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {
            "id": self.answer.name,
            "object": "chat.completion.chunk" if self.api_request.kind == "chat" else "text_completion",
            "created": self.answer.created,
            "model": self.api_request.model,
            "choices": choices,
        }
        return chunk | {"usage": None} if self.api_request.include_usage else chunk


def _matched(stop: str | None) -> dict[str, str]:
    """Returns vLLM's field with the text of `stop` that ended a choice, if one did."""
    return {} if stop is None else {"stop_reason": stop}


def _begun_call(part: ToolCallPart) -> dict[str, Any]:
    if not part.id:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}


_UNFINISHED = {"logprobs": None, "finish_reason": None}


def whole_answer(
    api_request: ApiRequest,
    answer: AnswerId,
    choices: Sequence[FinishedChoice],
    usages: Sequence[Usage],
    accepted: Accepted | None = None,
) -> dict[str, Any]:
    """Returns the whole answer. Raises `ApiError` if a choice ended for a reason that OpenAI's API does not have."""
    whole = {
        "id": answer.name,
        "object": "chat.completion" if api_request.kind == "chat" else "text_completion",
        "created": answer.created,
        "model": api_request.model,
        "choices": [_whole_choice(api_request, index, choice) for index, choice in enumerate(choices)],
        "usage": usage_of(api_request, usages),
        **_not_enforced(accepted),
    }
    # As in vLLM: a chat has one prompt, a completion one for each choice.
    return whole | _prompt_logprobs(api_request, choices[0]) if api_request.kind == "chat" else whole


def _not_enforced(accepted: Accepted | None) -> dict[str, Any]:
    """Returns the fields about what of a request's tools and schemas is not enforced."""
    if accepted is None:
        return {}
    functions = [{"name": one.name, "reason": one.reason} for one in accepted.unenforced_functions]
    found = {UNENFORCED_TOOLS: functions, IGNORED_WORDS: list(accepted.ignored_schema_words)}
    return {name: values for name, values in found.items() if values}


def not_enforced(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns the same fields of a chunk or an answer, for another API's."""
    return {name: answer[name] for name in (UNENFORCED_TOOLS, IGNORED_WORDS) if name in answer}


def _whole_choice(api_request: ApiRequest, index: int, choice: FinishedChoice) -> dict[str, Any]:
    positions = [*choice.prompt, *choice.logprobs] if api_request.echoes else choice.logprobs
    reason = openai_finish_reason(choice.reason, len(choice.tool_calls), is_cut=choice.is_cut)
    end = {"logprobs": logprobs_of(api_request, positions), "finish_reason": reason, **_matched(choice.stop)}
    if api_request.kind == "completion":
        return {"index": index, "text": choice.text, **end, **_prompt_logprobs(api_request, choice)}
    return {"index": index, "message": _message(api_request, choice), **end}


def _message(api_request: ApiRequest, choice: FinishedChoice) -> dict[str, Any]:
    content = choice.text or (None if choice.tool_calls or choice.reasoning else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if choice.reasoning:
        message |= dict.fromkeys(api_request.reasoning_fields, choice.reasoning)
    if choice.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.tool_calls
        ]
    return message


def logprobs_of(
    api_request: ApiRequest, positions: Sequence[PositionLogprobs | None], text_offset: int = 0
) -> dict[str, Any] | None:
    """Returns the log probabilities of tokens, if requested. `text_offset` is the number of characters before them."""
    if api_request.num_top is None or not positions:
        return None
    if api_request.kind == "chat":
        return openai_logprobs.of_chat(positions)
    # The prompt may have more of the likeliest tokens, for `prompt_logprobs`.
    shown = [None if one is None else replace(one, top=one.top[: api_request.num_top]) for one in positions]
    return openai_logprobs.of_completion(shown, text_offset)


def _prompt_logprobs(api_request: ApiRequest, choice: FinishedChoice) -> dict[str, Any]:
    """Returns vLLM's field, if requested."""
    if api_request.num_prompt_top is None:
        return {}
    return {"prompt_logprobs": openai_logprobs.of_prompt(choice.prompt, api_request.num_prompt_top)}


def openai_finish_reason(
    reason: FinishReason, num_tool_calls: int = 0, *, is_cut: bool = False
) -> Literal["stop", "length", "tool_calls"]:
    """Returns OpenAI's name of the reason: clients parse the calls, or the form that they asked for, unless that is
    `length`. Raises `ApiError` if there is none."""
    if reason not in _FINISH:
        raise from_end(reason)
    named = "length" if is_cut else _FINISH[reason]
    return "tool_calls" if named == "stop" and num_tool_calls else named


def shown_usage(api_request: ApiRequest, usage: Usage) -> Usage:
    """Returns the usage of a prompt, without output that its client does not get."""
    return replace(usage, output_tokens=0) if api_request.drops_output else usage


def usage_of(api_request: ApiRequest, usages: Sequence[Usage]) -> dict[str, Any]:
    """Counts the tokens of all prompts, each of which counts once, and of all their choices."""
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    output_tokens = sum(usage.output_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
        "completion_tokens_details": {"reasoning_tokens": sum(usage.reasoning_tokens for usage in usages)},
        **({"resources": _resources_of(usages)} if api_request.includes_resources else {}),
    }


def _resources_of(usages: Sequence[Usage]) -> dict[str, Any] | None:
    """Returns what all prompts have used of executors together; None if that of one is not known."""
    known = [asdict(usage.resources) for usage in usages if usage.resources is not None]
    if len(known) < len(usages):
        return None
    return {name: sum(one[name] for one in known) for name in known[0]}


def model_objects(model: Model, created: int) -> Iterator[dict[str, Any]]:
    """Returns the entries of `/v1/models` for a model and its adapters; `max_model_len`, `root` and `parent` are vLLM's
    fields."""
    entry = {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "inflight",
        "max_model_len": model.context_length,
        "root": model.name,
        "parent": None,
    }
    yield entry
    for adapter in model.adapters:
        yield {**entry, "id": f"{model.name}:{adapter.name}", "root": adapter.name, "parent": model.name}


# Characters that many clients take for the end of a line, and with it of an event. In JSON they are in strings only.
_LINE_ENDS = str.maketrans({character: f"\\u{ord(character):04x}" for character in "\u0085\u2028\u2029"})


def encoded(value: Any) -> bytes:
    """Encodes a value as JSON in one line without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).translate(_LINE_ENDS).encode()


def named_event(event: dict[str, Any], name: str = "") -> bytes:
    """Returns an event that a stream names by its type; `name` is its id, if it has one."""
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\n" + id_line(name) + b"data: " + encoded(event) + b"\n\n"


def id_line(name: str) -> bytes:
    """Returns the line with an event's id; nothing for an event without one."""
    return f"id: {name}\n".encode() if name else b""


class Form(Protocol):
    """How the answer to one request is written: as a chat or completion, or in the form of another API."""

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Returns the body for a whole answer."""

    def resume(self, last_id: str) -> str:
        """Continues after the event with this id. Returns the id of the chat's chunk. Raises `ApiError`."""

    def event(self, chunk: dict[str, Any], name: str) -> bytes:
        """Returns the events for a chunk; `name` is the event's id."""

    def started(self, prompt_tokens: int, cached_tokens: int) -> bytes:
        """Returns what is sent when a prompt's computation has started."""

    def waiting(self, reason: str) -> bytes:
        """Returns what is sent in a time without output."""

    def failure(self, error: ApiError) -> bytes:
        """Returns the event for an error in the middle of a stream, which it ends."""

    def refusal(self, error: ApiError) -> ApiError:
        """Returns the error to raise before anything was sent."""

    def end(self) -> bytes:
        """Returns what follows the last event of a complete stream."""


class CommentingForm:
    """What forms have in common whose streams are kept open by comments."""

    def resume(self, last_id: str) -> str:
        """Returns the id, which is that of the chunk."""
        return last_id

    def started(self, prompt_tokens: int, cached_tokens: int) -> bytes:
        """Returns nothing."""
        return b""

    def waiting(self, reason: str) -> bytes:
        """Returns a comment without an empty line after it: openai-python takes the empty line for an event without
        data once an event had an id, and fails to parse it."""
        return f": {reason}\n".encode()


class OwnForm(CommentingForm):
    """Chats and completions as they are."""

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer."""
        return answer

    def event(self, chunk: dict[str, Any], name: str) -> bytes:
        return id_line(name) + b"data: " + encoded(chunk) + b"\n\n"

    def failure(self, error: ApiError) -> bytes:
        """Returns the error as an event."""
        return self.event(error.body(), "")

    def refusal(self, error: ApiError) -> ApiError:
        """Returns the error."""
        return error

    def end(self) -> bytes:
        """Returns OpenAI's mark of the end."""
        return DONE
