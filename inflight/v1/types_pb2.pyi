import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PriorityClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_CLASS_UNSPECIFIED: _ClassVar[PriorityClass]
    PRIORITY_CLASS_INTERACTIVE: _ClassVar[PriorityClass]
    PRIORITY_CLASS_STANDARD: _ClassVar[PriorityClass]
    PRIORITY_CLASS_BATCH: _ClassVar[PriorityClass]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_STOP_STRING: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_DEADLINE: _ClassVar[FinishReason]
    FINISH_REASON_PREEMPTED: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class BatchingMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BATCHING_MODE_UNSPECIFIED: _ClassVar[BatchingMode]
    BATCHING_MODE_INFLIGHT: _ClassVar[BatchingMode]
    BATCHING_MODE_STATIC: _ClassVar[BatchingMode]

class SchedulerPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCHEDULER_POLICY_UNSPECIFIED: _ClassVar[SchedulerPolicy]
    SCHEDULER_POLICY_GUARANTEED_NO_EVICT: _ClassVar[SchedulerPolicy]
    SCHEDULER_POLICY_MAX_UTILIZATION: _ClassVar[SchedulerPolicy]

class StepConstraint(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_CONSTRAINT_UNSPECIFIED: _ClassVar[StepConstraint]
    STEP_CONSTRAINT_NO_WORK: _ClassVar[StepConstraint]
    STEP_CONSTRAINT_SEATS: _ClassVar[StepConstraint]
    STEP_CONSTRAINT_BLOCKS: _ClassVar[StepConstraint]
    STEP_CONSTRAINT_TOKENS: _ClassVar[StepConstraint]
    STEP_CONSTRAINT_PACE: _ClassVar[StepConstraint]
    STEP_CONSTRAINT_STATIC_BATCH: _ClassVar[StepConstraint]
    STEP_CONSTRAINT_TWIN: _ClassVar[StepConstraint]

class PoolingKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_KIND_UNSPECIFIED: _ClassVar[PoolingKind]
    POOLING_KIND_LAST: _ClassVar[PoolingKind]
    POOLING_KIND_MEAN: _ClassVar[PoolingKind]
    POOLING_KIND_SCORE: _ClassVar[PoolingKind]
PRIORITY_CLASS_UNSPECIFIED: PriorityClass
PRIORITY_CLASS_INTERACTIVE: PriorityClass
PRIORITY_CLASS_STANDARD: PriorityClass
PRIORITY_CLASS_BATCH: PriorityClass
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP_TOKEN: FinishReason
FINISH_REASON_STOP_STRING: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_DEADLINE: FinishReason
FINISH_REASON_PREEMPTED: FinishReason
FINISH_REASON_ERROR: FinishReason
BATCHING_MODE_UNSPECIFIED: BatchingMode
BATCHING_MODE_INFLIGHT: BatchingMode
BATCHING_MODE_STATIC: BatchingMode
SCHEDULER_POLICY_UNSPECIFIED: SchedulerPolicy
SCHEDULER_POLICY_GUARANTEED_NO_EVICT: SchedulerPolicy
SCHEDULER_POLICY_MAX_UTILIZATION: SchedulerPolicy
STEP_CONSTRAINT_UNSPECIFIED: StepConstraint
STEP_CONSTRAINT_NO_WORK: StepConstraint
STEP_CONSTRAINT_SEATS: StepConstraint
STEP_CONSTRAINT_BLOCKS: StepConstraint
STEP_CONSTRAINT_TOKENS: StepConstraint
STEP_CONSTRAINT_PACE: StepConstraint
STEP_CONSTRAINT_STATIC_BATCH: StepConstraint
STEP_CONSTRAINT_TWIN: StepConstraint
POOLING_KIND_UNSPECIFIED: PoolingKind
POOLING_KIND_LAST: PoolingKind
POOLING_KIND_MEAN: PoolingKind
POOLING_KIND_SCORE: PoolingKind

class DraftCounts(_message.Message):
    __slots__ = ("num_drafts", "num_verified", "num_accepted")
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    num_drafts: int
    num_verified: int
    num_accepted: int
    def __init__(self, num_drafts: _Optional[int] = ..., num_verified: _Optional[int] = ..., num_accepted: _Optional[int] = ...) -> None: ...

class HostPrefixes(_message.Message):
    __slots__ = ("num_blocks", "stored_blocks", "restored_blocks", "dropped_blocks", "hit_tokens")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    stored_blocks: int
    restored_blocks: int
    dropped_blocks: int
    hit_tokens: int
    def __init__(self, num_blocks: _Optional[int] = ..., stored_blocks: _Optional[int] = ..., restored_blocks: _Optional[int] = ..., dropped_blocks: _Optional[int] = ..., hit_tokens: _Optional[int] = ...) -> None: ...

class RecurrentStates(_message.Message):
    __slots__ = ("num_slots", "used_slots", "num_checkpoints", "kept_checkpoints", "saved_checkpoints", "loaded_checkpoints", "dropped_checkpoints", "kv_tokens", "usable_tokens")
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    USED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    KEPT_CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    SAVED_CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    LOADED_CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_slots: int
    used_slots: int
    num_checkpoints: int
    kept_checkpoints: int
    saved_checkpoints: int
    loaded_checkpoints: int
    dropped_checkpoints: int
    kv_tokens: int
    usable_tokens: int
    def __init__(self, num_slots: _Optional[int] = ..., used_slots: _Optional[int] = ..., num_checkpoints: _Optional[int] = ..., kept_checkpoints: _Optional[int] = ..., saved_checkpoints: _Optional[int] = ..., loaded_checkpoints: _Optional[int] = ..., dropped_checkpoints: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., usable_tokens: _Optional[int] = ...) -> None: ...

class StepBound(_message.Message):
    __slots__ = ("constraint", "num_steps")
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    constraint: StepConstraint
    num_steps: int
    def __init__(self, constraint: _Optional[_Union[StepConstraint, str]] = ..., num_steps: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "logit_bias", "allowed_token_ids", "bad_words", "no_repeat_ngram_size", "bad_word_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    NO_REPEAT_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    no_repeat_ngram_size: int
    bad_word_ids: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., typical_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[str]] = ..., no_repeat_ngram_size: _Optional[int] = ..., bad_word_ids: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StoppingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop", "ignore_eos")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_stop: bool
    ignore_eos: bool
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., include_stop: _Optional[bool] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_schema", "regex", "grammar", "choice", "json_object", "max_whitespace")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    MAX_WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    grammar: str
    choice: ChoiceList
    json_object: bool
    max_whitespace: int
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choice: _Optional[_Union[ChoiceList, _Mapping]] = ..., json_object: _Optional[bool] = ..., max_whitespace: _Optional[int] = ...) -> None: ...

class ChoiceList(_message.Message):
    __slots__ = ("choices",)
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, choices: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "text_bytes", "is_special", "rank")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    text_bytes: bytes
    is_special: bool
    rank: int
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., text_bytes: _Optional[bytes] = ..., is_special: _Optional[bool] = ..., rank: _Optional[int] = ...) -> None: ...

class PositionLogprobs(_message.Message):
    __slots__ = ("chosen", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: TokenLogprob
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, chosen: _Optional[_Union[TokenLogprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "resources")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    resources: ResourceUsage
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ..., resources: _Optional[_Union[ResourceUsage, _Mapping]] = ...) -> None: ...

class ResourceUsage(_message.Message):
    __slots__ = ("busy_ns", "seat_us", "block_ms", "computed_prompt_tokens", "cached_prompt_tokens", "output_tokens", "wasted_draft_tokens", "recomputed_tokens")
    BUSY_NS_FIELD_NUMBER: _ClassVar[int]
    SEAT_US_FIELD_NUMBER: _ClassVar[int]
    BLOCK_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WASTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    busy_ns: int
    seat_us: int
    block_ms: int
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    wasted_draft_tokens: int
    recomputed_tokens: int
    def __init__(self, busy_ns: _Optional[int] = ..., seat_us: _Optional[int] = ..., block_ms: _Optional[int] = ..., computed_prompt_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., wasted_draft_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("queue", "prefill", "time_to_first_token", "decode", "migrations")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    queue: _duration_pb2.Duration
    prefill: _duration_pb2.Duration
    time_to_first_token: _duration_pb2.Duration
    decode: _duration_pb2.Duration
    migrations: int
    def __init__(self, queue: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prefill: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., time_to_first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., decode: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., migrations: _Optional[int] = ...) -> None: ...

class UnenforcedFunction(_message.Message):
    __slots__ = ("name", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Pooling(_message.Message):
    __slots__ = ("kind", "size", "is_normalized", "is_only")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    IS_NORMALIZED_FIELD_NUMBER: _ClassVar[int]
    IS_ONLY_FIELD_NUMBER: _ClassVar[int]
    kind: PoolingKind
    size: int
    is_normalized: bool
    is_only: bool
    def __init__(self, kind: _Optional[_Union[PoolingKind, str]] = ..., size: _Optional[int] = ..., is_normalized: _Optional[bool] = ..., is_only: _Optional[bool] = ...) -> None: ...
