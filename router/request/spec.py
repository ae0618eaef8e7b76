"""A request as the router works with it: validated, every default filled in. Plain values.

`GenerateSpec` is what a `GenerateRequest` means for one model; `FittedRequest` adds what is known once the prompt is
tokenized; `Delivery` has what its client reads of it. `None` means not asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inflight.router.constraint.answer_grammar import ToolSchema
from inflight.router.constraint.source import ConstraintSource
from inflight.router.text.output import OutputText
from inflight.router.tools.parser import AnswerParser
from inflight.v1 import inference_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Absolute deadlines in seconds of `time.monotonic`; None: none."""

    first_token: float | None
    total: float | None

    def next(self, has_first_token: bool) -> float | None:
        """Returns the deadline that applies now."""
        candidates = [d for d in (None if has_first_token else self.first_token, self.total) if d is not None]
        return min(candidates, default=None)


@dataclass(frozen=True, slots=True)
class ChoiceCounts:
    """The choices that a request generates, and those of them that its client gets: the best ones."""

    generated: int = 1
    sent: int = 1

    @property
    def picks_best(self) -> bool:
        """Whether the client gets some of the choices, which are known at the end only."""
        return self.sent < self.generated


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a request's client reads, and how long the request continues without a client.

    `accepted` is the first event of every stream of the request. `name_token` adds the text of a token to its id.
    `echoes`: the text begins with that of `prompt_ids`. `stream_interval` is the number of tokens per event.
    `unattended_s` None: until its end; 0: not at all. `kept_s` is how long the output is kept after the end; None: for
    the default time. `digest` is that of a request that may be repeated.
    `new_parser` None: the output is not divided into parts. `call_id` returns the id of a call by its index.
    """

    accepted: inference_pb2.Accepted
    new_text: Callable[[], OutputText]
    name_token: Callable[[types_pb2.TokenLogprob], None]
    wants_text: bool
    wants_token_ids: bool
    deadlines: Deadlines
    wants_logprobs: bool = False
    prompt_ids: Sequence[int] = ()
    wants_prompt_logprobs: bool = False
    echoes: bool = False
    is_constrained: bool = False
    unattended_s: float | None = 0.0
    kept_s: float | None = None
    digest: bytes = b""
    choices: ChoiceCounts = ChoiceCounts()
    stream_interval: int = 1
    new_parser: Callable[[], AnswerParser] | None = None
    call_id: Callable[[int], str] = str


@dataclass(frozen=True, slots=True)
class ReadPosition:
    """How far a client has read: tokens, and bytes of their text; None: all text of these tokens.

    `is_started`: it also got the event that the request has a seat.
    """

    offset: int = 0
    text_bytes: int | None = None
    is_started: bool = False


BEGINNING = ReadPosition()


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a model and the router's settings allow. `default_sampling` is the model's generation config."""

    context_length: int
    vocabulary_size: int
    eos_token_ids: frozenset[int]
    default_sampling: types_pb2.SamplingParams
    has_chat_template: bool
    max_prompt_bytes: int = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to tokenize. `field` is the request's field that it came in."""

    field: str
    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids to use as they are."""

    field: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the model's chat template."""

    field: str
    chat: inference_pb2.Chat
    add_generation_prompt: bool = True


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """How tokens are chosen. `temperature` 0 is greedy; the defaults of the other values change nothing.

    `logit_bias` is in order of the ids. `bad_word_ids` have the sequences of `bad_words` once these are tokenized.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()

    def to_proto(self) -> types_pb2.SamplingParams:
        """With every default filled in, as `Accepted` and `Submit` carry it."""
        return types_pb2.SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            typical_p=1.0,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            logit_bias=dict(self.logit_bias),
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            bad_word_ids=[types_pb2.TokenSequence(ids=ids) for ids in self.bad_word_ids],
        )


@dataclass(frozen=True, slots=True)
class ResolvedStopping:
    """When the output ends. `stop_token_ids` are the request's own; `max_tokens` None is what the context leaves."""

    max_tokens: int | None
    min_tokens: int
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop: bool
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class OutputFlags:
    """What the stream carries. `num_top_logprobs` and `num_prompt_logprobs` None: no log probabilities of the output or
    of the prompt. `stream_interval` is the number of tokens per event."""

    text: bool
    token_ids: bool
    num_top_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    echo: bool = False
    stream_interval: int = 1
    parts: bool = False


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions that the model may call; `must_call`: at least one, `may_repeat`: several."""

    functions: tuple[ToolSchema, ...]
    must_call: bool
    may_repeat: bool


@dataclass(frozen=True, slots=True)
class GenerateSpec:
    """A request that is sound in itself. `request_id`, `model` and `tenant` None are the router's to choose.

    `priority` is a `PriorityClass` of the protocol, never unspecified. `inter_token_target_ms` None is that of the
    class, `max_drafts` None that of the executor. Deadlines count from arrival. `resume_ttl_s` None was not asked for.
    `prior_ids` are output that the client has, and `place` is how far it has read them.
    """

    request_id: str | None
    model: str | None
    tenant: str | None
    prompt: Prompt
    truncate_prompt_tokens: int | None
    sampling: ResolvedSampling
    stopping: ResolvedStopping
    output: OutputFlags
    priority: int
    inter_token_target_ms: int | None
    max_drafts: int | None
    first_token_deadline_s: float | None
    total_deadline_s: float | None
    session_id: str
    cache_salt: str
    cache_bypass: bool
    want_queue_events: bool
    idempotency_key: str
    detach: bool
    resume_ttl_s: float | None
    prior_ids: tuple[int, ...]
    place: ReadPosition
    metadata: tuple[tuple[str, str], ...]
    choices: ChoiceCounts
    constraint: ConstraintSource | None = None
    tools: ToolUse | None = None


@dataclass(frozen=True, slots=True)
class FittedRequest:
    """A request whose tokens fit the model's context.

    `ending_token_ids` end the output: those of the request and, unless they are ignored, the model's.
    `num_truncated_tokens` were cut from the prompt's beginning.
    """

    spec: GenerateSpec
    prompt_ids: tuple[int, ...]
    max_tokens: int
    ending_token_ids: frozenset[int]
    num_truncated_tokens: int

    def stopping_proto(self) -> types_pb2.StoppingParams:
        """With every default filled in, as `Submit` carries it; stop strings are the router's own."""
        stopping = self.spec.stopping
        return types_pb2.StoppingParams(
            max_tokens=self.max_tokens,
            min_tokens=stopping.min_tokens,
            stop_token_ids=stopping.stop_token_ids,
            ignore_eos=stopping.ignore_eos,
        )
