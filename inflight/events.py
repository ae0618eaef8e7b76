"""Events of a stream, as frozen values, and the transcript that accumulates them. Shared by both clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import grpc
from google.protobuf.duration_pb2 import Duration

from inflight.errors import InflightError
from inflight.notebook import html
from inflight.v1 import inference_pb2, types_pb2


class FinishReason(Enum):
    """Why a choice ended."""

    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    PREEMPTED = "preempted"
    ERROR = "error"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token with the natural logarithm of its probability, which is minus infinity for an impossible token.

    One character may need the `text_bytes` of several tokens. The output's text omits a token with `is_special`. `rank`
    is 1 for the likeliest token at its position; 0: unknown.
    """

    token_id: int
    logprob: float
    text_bytes: bytes = b""
    is_special: bool = False
    rank: int = 0

    @property
    def text(self) -> str:
        """The text of the token. Incomplete characters are replaced by U+FFFD."""
        return self.text_bytes.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The token at a position, and the most likely tokens there."""

    chosen: Logprob
    top: tuple[Logprob, ...]


@dataclass(frozen=True, slots=True)
class UnenforcedFunction:
    """A function whose parameters are not enforced, because its schema has what `reason` says."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """An executor has accepted the request. `has_parts`: the output is divided into parts. If parts were requested and
    it is false, all text is content. Calls of `unenforced_functions` may have any JSON object as arguments.
    `ignored_schema_words` are unknown to JSON Schema and have no effect."""

    request_id: str
    resume_token: str
    prompt_tokens: int
    max_tokens: int
    has_parts: bool = False
    unenforced_functions: tuple[UnenforcedFunction, ...] = ()
    ignored_schema_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits. Sent if `want_queue_events` is set. Only the first one of a stream has `request_id` and
    `resume_token`."""

    position: int
    estimated_wait_s: float | None
    request_id: str | None = None
    resume_token: str | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The request has boarded. `queue_s` is the time from its arrival until then; None: unknown."""

    executor_id: str
    cached_tokens: int
    queue_s: float | None


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens of the prompt from position `offset` on, with their log probabilities: `None` for the first of the prompt.

    Sent before the output if `want_prompt_logprobs` or `top_prompt_logprobs` is set. In the event with offset 0,
    `first_text_bytes` is the text of the first token. The text of the prompt omits that token if `first_is_special`.
    """

    offset: int
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs | None, ...]
    first_text_bytes: bytes = b""
    first_is_special: bool = False


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """More text of the reasoning, without its tags."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentPart:
    """More text of the content, the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """The beginning or a continuation of tool call `index`. The first part of a call has its `id` and `name`.
    `arguments` is more of the arguments' JSON text."""

    index: int
    id: str
    name: str
    arguments: str


Part = ReasoningPart | ContentPart | ToolCallPart


@dataclass(frozen=True, slots=True)
class Delta:
    """More output. `offset` is the index of its first token among the choice's output tokens.

    If log probabilities were requested, `logprobs` has one value for each token; `None`: no longer known. If the output
    has parts, `parts` are the new reasoning, content and calls in the text up to here.
    """

    text: str
    token_ids: tuple[int, ...]
    offset: int
    num_tokens: int
    choice: int = 0
    logprobs: tuple[PositionLogprobs | None, ...] = ()
    parts: tuple[Part, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Finished:
    """A choice has ended. `stop` or `stop_token_id` is the stop that it matched. `constraint_unfinished`: the output
    does not satisfy the request's constraint, such as JSON that `max_tokens` cut off. `parts` are the last parts of the
    output, if it has parts."""

    choice: int
    reason: FinishReason
    stop: str | None = None
    stop_token_id: int | None = None
    constraint_unfinished: bool = False
    parts: tuple[Part, ...] = ()
    num_tool_calls: int = 0


@dataclass(frozen=True, slots=True)
class Resources:
    """What a request has used of executors: its share of the time in which they computed, the time with a seat, the
    time with KV blocks times their number, and tokens. `recomputed_tokens` were computed again after a preemption or a
    failure, `wasted_draft_tokens` were drafted and not accepted."""

    busy_s: float
    seat_s: float
    block_s: float
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    wasted_draft_tokens: int
    recomputed_tokens: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. `resources` is None if no executor reported them; comparisons ignore it."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    resources: Resources | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of a request, measured by the router. `None`: not measured. `migrations` is how often the request moved to
    another executor."""

    queue_s: float | None
    prefill_s: float | None
    time_to_first_token_s: float | None
    decode_s: float | None
    migrations: int


@dataclass(frozen=True, slots=True)
class Done:
    """The request has ended. This is the last event."""

    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class Notice:
    """Information for the user. The stream continues. `kind` is `migrated`, `paused` or `unspecified`."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """The connection broke with the error `cause`, and the stream continues. The client creates this event. `number`
    counts from 1."""

    number: int
    cause: str


Event = Accepted | Queued | Started | Prompt | Delta | Finished | Done | Notice | Resumed


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Choice:
    """The output of one choice so far. `text` is the whole output. With `tools` or `want_parts` the output is also
    divided into `reasoning`, `content` and `tool_calls`."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: FinishReason | None = None
    logprobs: list[PositionLogprobs | None] = field(default_factory=list)
    constraint_unfinished: bool = False
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def take_parts(self, parts: Sequence[Part]) -> None:
        """Adds parts of the output."""
        for part in parts:
            match part:
                case ReasoningPart():
                    self.reasoning += part.text
                case ContentPart():
                    self.content += part.text
                case ToolCallPart() if part.index < len(self.tool_calls):
                    call = self.tool_calls[part.index]
                    self.tool_calls[part.index] = replace(call, arguments=call.arguments + part.arguments)
                case ToolCallPart():
                    self.tool_calls.append(ToolCall(part.id, part.name, part.arguments))


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole result of a request. The properties, such as `text` and `finish_reason`, are those of the first choice.

    `prompt_token_ids` and `prompt_logprobs` are empty unless `want_prompt_logprobs` or `top_prompt_logprobs` was set.
    The first value of `prompt_logprobs` is `None`.
    """

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timing: Timing
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs | None, ...] = ()

    @property
    def text(self) -> str:
        """The text."""
        return self.choices[0].text

    @property
    def content(self) -> str:
        """The text of the answer; with `tools` or `want_parts`, without reasoning and tool calls."""
        return self.choices[0].content

    @property
    def reasoning(self) -> str:
        """The reasoning; empty unless `tools` or `want_parts` was set."""
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls; empty unless `tools` or `want_parts` was set."""
        return tuple(self.choices[0].tool_calls)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The output's token ids; empty unless `want_token_ids` was set."""
        return tuple(self.choices[0].token_ids)

    @property
    def logprobs(self) -> tuple[PositionLogprobs | None, ...]:
        """One value for each output token; empty unless `want_logprobs` or `top_logprobs` was set."""
        return tuple(self.choices[0].logprobs)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended."""
        return self.choices[0].finish_reason

    @property
    def constraint_unfinished(self) -> bool:
        """Whether it ended before it satisfied the request's constraint."""
        return self.choices[0].constraint_unfinished

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return html.answer([choice.text for choice in self.choices], self._note())

    def _note(self) -> str:
        reason = "" if self.finish_reason is None else f", {self.finish_reason.value.replace('_', ' ')}"
        first_s = self.timing.time_to_first_token_s
        first = "" if first_s is None else f", first after {first_s:.2f} s"
        return f"{self.usage.prompt_tokens} → {self.usage.output_tokens} tokens{first}{reason}"


class Transcript:
    """Accumulates the events of one stream."""

    def __init__(self) -> None:
        self.request_id: str | None = None
        self.resume_token: str | None = None
        self.prompt_tokens: int | None = None
        self.executor_id: str | None = None
        self.prompt_token_ids: list[int] = []
        self.prompt_logprobs: list[PositionLogprobs | None] = []
        self.choices: list[Choice] = [Choice()]
        self.usage: Usage | None = None
        self.timing: Timing | None = None
        self.has_parts = False

    def add(self, wire: inference_pb2.StreamEvent) -> Event | None:
        """Adds an event from its message and returns the event; `None` for a kind that this version does not know."""
        event = decode_event(wire)
        if event is not None:
            self.take(event)
        return event

    def take(self, event: Event) -> None:
        """Adds an event."""
        if isinstance(event, Delta):
            choice = self._choice(event.choice)
            choice.text += event.text
            choice.token_ids.extend(event.token_ids)
            choice.num_tokens += event.num_tokens
            choice.logprobs.extend(event.logprobs)
            choice.take_parts(event.parts)
            return
        match event:
            case Accepted():
                self.request_id = event.request_id
                self.resume_token = event.resume_token
                self.prompt_tokens = event.prompt_tokens
                self.has_parts = event.has_parts
            case Queued() if event.request_id is not None:
                self.request_id = event.request_id
                self.resume_token = event.resume_token
            case Started():
                self.executor_id = event.executor_id
            case Prompt():
                self.prompt_token_ids.extend(event.token_ids)
                self.prompt_logprobs.extend(event.logprobs)
            case Finished():
                choice = self._choice(event.choice)
                choice.finish_reason = event.reason
                choice.constraint_unfinished = event.constraint_unfinished
                choice.take_parts(event.parts)
                if not self.has_parts:
                    choice.content = choice.text
            case Done():
                self.usage = event.usage
                self.timing = event.timing

    def mark_cancelled(self) -> None:
        """Marks unfinished choices as cancelled."""
        for choice in self.choices:
            choice.finish_reason = choice.finish_reason or FinishReason.CANCELLED

    def result(self) -> Completion:
        """Returns the whole result of a stream that has ended.

        Raises:
            InflightError: its last event is missing.
        """
        if self.usage is None or self.timing is None:
            cancelled = self.choices[0].finish_reason is FinishReason.CANCELLED
            code = grpc.StatusCode.CANCELLED if cancelled else grpc.StatusCode.INTERNAL
            raise InflightError(code, "the stream ended before its last event")
        prompt = (tuple(self.prompt_token_ids), tuple(self.prompt_logprobs))
        return Completion(self.request_id or "", tuple(self.choices), self.usage, self.timing, *prompt)

    def _choice(self, index: int) -> Choice:
        while len(self.choices) <= index:
            self.choices.append(Choice())
        return self.choices[index]


def decode_event(wire: inference_pb2.StreamEvent) -> Event | None:
    """Returns the event in a message; `None` for a kind that this version does not know."""
    match wire.WhichOneof("event"):
        case "accepted":
            accepted = wire.accepted
            return Accepted(
                accepted.request_id,
                accepted.resume_token,
                accepted.prompt_tokens,
                accepted.max_tokens,
                accepted.has_parts,
                tuple(UnenforcedFunction(one.name, one.reason) for one in accepted.unenforced_functions),
                tuple(accepted.ignored_schema_words),
            )
        case "queued":
            wait_s = _seconds(wire.queued.estimated_wait) if wire.queued.HasField("estimated_wait") else None
            return Queued(
                wire.queued.position, wait_s, wire.queued.request_id or None, wire.queued.resume_token or None
            )
        case "started":
            queue_s = _seconds(wire.started.queue) if wire.started.HasField("queue") else None
            return Started(wire.started.executor_id, wire.started.cached_tokens, queue_s)
        case "prompt":
            return _prompt(wire.prompt)
        case "delta":
            return _delta(wire.delta)
        case "finished":
            return _finished(wire.finished)
        case "done":
            return Done(_usage(wire.done.usage), _timing(wire.done.timing))
        case "notice":
            kind = inference_pb2.Notice.Kind.Name(wire.notice.kind).removeprefix("KIND_").lower()
            return Notice(kind, wire.notice.text)
        case _:
            return None


def _prompt(wire: inference_pb2.Prompt) -> Prompt:
    return Prompt(
        offset=wire.offset,
        token_ids=tuple(wire.token_ids),
        logprobs=tuple(map(_position, wire.logprobs)),
        first_text_bytes=wire.first_text_bytes,
        first_is_special=wire.first_is_special,
    )


def _delta(wire: inference_pb2.Delta) -> Delta:
    return Delta(
        text=wire.text,
        token_ids=tuple(wire.token_ids),
        offset=wire.offset,
        num_tokens=wire.num_tokens,
        choice=wire.choice,
        logprobs=decode_positions(wire.logprobs),
        parts=decode_parts(wire.parts),
    )


def decode_parts(wire: Sequence[inference_pb2.OutputPart]) -> tuple[Part, ...]:
    """Returns the parts in messages, without parts of a kind that this version does not know."""
    return tuple(part for one in wire if (part := _part(one)) is not None) if wire else ()


def _part(wire: inference_pb2.OutputPart) -> Part | None:
    match wire.WhichOneof("part"):
        case "reasoning":
            return ReasoningPart(wire.reasoning)
        case "content":
            return ContentPart(wire.content)
        case "tool_call":
            call = wire.tool_call
            return ToolCallPart(call.index, call.id, call.name, call.arguments)
        case _:
            return None


def decode_positions(wire: Sequence[types_pb2.PositionLogprobs]) -> tuple[PositionLogprobs | None, ...]:
    """Returns the log probabilities in messages; `None` for those that are no longer known."""
    return tuple(map(_position, wire)) if wire else ()


def _finished(wire: inference_pb2.Finished) -> Finished:
    matched = wire.WhichOneof("matched")
    return Finished(
        choice=wire.choice,
        reason=finish_reason(wire.reason),
        stop=wire.stop if matched == "stop" else None,
        stop_token_id=wire.stop_token_id if matched == "stop_token_id" else None,
        constraint_unfinished=wire.constraint_unfinished,
        parts=decode_parts(wire.parts),
        num_tool_calls=wire.num_tool_calls,
    )


def finish_reason(wire: int) -> FinishReason:
    """Returns the reason for its number in messages; `UNKNOWN` for a reason that this version does not know."""
    names = {number: name.removeprefix("FINISH_REASON_") for name, number in types_pb2.FinishReason.items()}
    name = names.get(types_pb2.FinishReason.ValueType(wire), "")
    return FinishReason[name] if name in FinishReason.__members__ else FinishReason.UNKNOWN


def _position(wire: types_pb2.PositionLogprobs) -> PositionLogprobs | None:
    if not wire.HasField("chosen"):
        return None
    return PositionLogprobs(_logprob(wire.chosen), tuple(map(_logprob, wire.top)))


def _logprob(wire: types_pb2.TokenLogprob) -> Logprob:
    return Logprob(wire.token_id, wire.logprob, wire.text_bytes, wire.is_special, wire.rank)


def _usage(wire: types_pb2.Usage) -> Usage:
    resources = decode_resources(wire.resources) if wire.HasField("resources") else None
    return Usage(wire.prompt_tokens, wire.cached_tokens, wire.output_tokens, wire.reasoning_tokens, resources)


def decode_resources(wire: types_pb2.ResourceUsage) -> Resources:
    """Returns what was used, times in seconds."""
    return Resources(
        wire.busy_ns / 1e9,
        wire.seat_us / 1e6,
        wire.block_ms / 1e3,
        wire.computed_prompt_tokens,
        wire.cached_prompt_tokens,
        wire.output_tokens,
        wire.wasted_draft_tokens,
        wire.recomputed_tokens,
    )


def _timing(wire: types_pb2.Timing) -> Timing:
    return Timing(
        queue_s=_seconds(wire.queue) if wire.HasField("queue") else None,
        prefill_s=_seconds(wire.prefill) if wire.HasField("prefill") else None,
        time_to_first_token_s=_seconds(wire.time_to_first_token) if wire.HasField("time_to_first_token") else None,
        decode_s=_seconds(wire.decode) if wire.HasField("decode") else None,
        migrations=wire.migrations,
    )


def _seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9
