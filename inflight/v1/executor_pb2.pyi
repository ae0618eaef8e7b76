from inflight.v1 import stats_pb2 as _stats_pb2
from inflight.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RejectReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REJECT_REASON_UNSPECIFIED: _ClassVar[RejectReason]
    REJECT_REASON_NO_CAPACITY: _ClassVar[RejectReason]
    REJECT_REASON_STALE_ATTEMPT: _ClassVar[RejectReason]
    REJECT_REASON_DRAINING: _ClassVar[RejectReason]
    REJECT_REASON_UNSUPPORTED: _ClassVar[RejectReason]
    REJECT_REASON_INVALID: _ClassVar[RejectReason]
    REJECT_REASON_NOT_HELD: _ClassVar[RejectReason]
REJECT_REASON_UNSPECIFIED: RejectReason
REJECT_REASON_NO_CAPACITY: RejectReason
REJECT_REASON_STALE_ATTEMPT: RejectReason
REJECT_REASON_DRAINING: RejectReason
REJECT_REASON_UNSUPPORTED: RejectReason
REJECT_REASON_INVALID: RejectReason
REJECT_REASON_NOT_HELD: RejectReason

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("executor_id", "generation", "protocol_version", "model", "model_revision", "block_size", "total_blocks", "max_num_sequences", "num_standby_sequences", "max_num_tokens", "context_length", "vocabulary_size", "eos_token_ids", "default_sampling", "batching", "backend", "dtype", "device", "scheduler_policy", "host_blocks", "kv_cache_dtype", "weight_dtype", "num_adapter_slots", "tensor_parallel_size", "state_grid_tokens", "inexact_resume", "pooling", "executor_class")
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_STANDBY_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    BATCHING_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_POLICY_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_ADAPTER_SLOTS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    STATE_GRID_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INEXACT_RESUME_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_CLASS_FIELD_NUMBER: _ClassVar[int]
    executor_id: str
    generation: int
    protocol_version: int
    model: str
    model_revision: str
    block_size: int
    total_blocks: int
    max_num_sequences: int
    num_standby_sequences: int
    max_num_tokens: int
    context_length: int
    vocabulary_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    default_sampling: _types_pb2.SamplingParams
    batching: _types_pb2.BatchingMode
    backend: str
    dtype: str
    device: str
    scheduler_policy: _types_pb2.SchedulerPolicy
    host_blocks: int
    kv_cache_dtype: str
    weight_dtype: str
    num_adapter_slots: int
    tensor_parallel_size: int
    state_grid_tokens: int
    inexact_resume: _containers.RepeatedScalarFieldContainer[str]
    pooling: _types_pb2.Pooling
    executor_class: str
    def __init__(self, executor_id: _Optional[str] = ..., generation: _Optional[int] = ..., protocol_version: _Optional[int] = ..., model: _Optional[str] = ..., model_revision: _Optional[str] = ..., block_size: _Optional[int] = ..., total_blocks: _Optional[int] = ..., max_num_sequences: _Optional[int] = ..., num_standby_sequences: _Optional[int] = ..., max_num_tokens: _Optional[int] = ..., context_length: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., default_sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., batching: _Optional[_Union[_types_pb2.BatchingMode, str]] = ..., backend: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., scheduler_policy: _Optional[_Union[_types_pb2.SchedulerPolicy, str]] = ..., host_blocks: _Optional[int] = ..., kv_cache_dtype: _Optional[str] = ..., weight_dtype: _Optional[str] = ..., num_adapter_slots: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., state_grid_tokens: _Optional[int] = ..., inexact_resume: _Optional[_Iterable[str]] = ..., pooling: _Optional[_Union[_types_pb2.Pooling, _Mapping]] = ..., executor_class: _Optional[str] = ...) -> None: ...

class ServeRequest(_message.Message):
    __slots__ = ("hello", "submits", "cancels", "attaches", "ack", "refusal")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    ATTACHES_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submits: _containers.RepeatedCompositeFieldContainer[Submit]
    cancels: _containers.RepeatedCompositeFieldContainer[CancelSequence]
    attaches: _containers.RepeatedCompositeFieldContainer[Attach]
    ack: Ack
    refusal: str
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submits: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., cancels: _Optional[_Iterable[_Union[CancelSequence, _Mapping]]] = ..., attaches: _Optional[_Iterable[_Union[Attach, _Mapping]]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., refusal: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router_id", "protocol_version", "generation", "max_unacked_steps")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MAX_UNACKED_STEPS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    protocol_version: int
    generation: int
    max_unacked_steps: int
    def __init__(self, router_id: _Optional[str] = ..., protocol_version: _Optional[int] = ..., generation: _Optional[int] = ..., max_unacked_steps: _Optional[int] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "attempt", "prompt_ids", "prior_output_ids", "sampling", "stopping", "reserved_blocks", "cache_salt", "cache_bypass", "priority", "deadline_ms", "num_choices", "num_top_logprobs", "router_context", "traceparent", "constraint", "num_prompt_logprobs", "inter_token_target_ms", "max_drafts", "adapter_hash", "stream_interval", "pooled", "tenant", "adapter_name", "exact_resume")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIOR_OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYPASS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_HASH_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_NAME_FIELD_NUMBER: _ClassVar[int]
    EXACT_RESUME_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    prior_output_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _types_pb2.SamplingParams
    stopping: _types_pb2.StoppingParams
    reserved_blocks: int
    cache_salt: bytes
    cache_bypass: bool
    priority: _types_pb2.PriorityClass
    deadline_ms: int
    num_choices: int
    num_top_logprobs: int
    router_context: bytes
    traceparent: str
    constraint: GrammarConstraint
    num_prompt_logprobs: int
    inter_token_target_ms: int
    max_drafts: int
    adapter_hash: str
    stream_interval: int
    pooled: PooledRequest
    tenant: str
    adapter_name: str
    exact_resume: bool
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., prior_output_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_types_pb2.StoppingParams, _Mapping]] = ..., reserved_blocks: _Optional[int] = ..., cache_salt: _Optional[bytes] = ..., cache_bypass: _Optional[bool] = ..., priority: _Optional[_Union[_types_pb2.PriorityClass, str]] = ..., deadline_ms: _Optional[int] = ..., num_choices: _Optional[int] = ..., num_top_logprobs: _Optional[int] = ..., router_context: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., constraint: _Optional[_Union[GrammarConstraint, _Mapping]] = ..., num_prompt_logprobs: _Optional[int] = ..., inter_token_target_ms: _Optional[int] = ..., max_drafts: _Optional[int] = ..., adapter_hash: _Optional[str] = ..., stream_interval: _Optional[int] = ..., pooled: _Optional[_Union[PooledRequest, _Mapping]] = ..., tenant: _Optional[str] = ..., adapter_name: _Optional[str] = ..., exact_resume: _Optional[bool] = ...) -> None: ...

class PooledRequest(_message.Message):
    __slots__ = ("dimensions",)
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    dimensions: int
    def __init__(self, dimensions: _Optional[int] = ...) -> None: ...

class GrammarConstraint(_message.Message):
    __slots__ = ("grammar", "hash")
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    grammar: str
    hash: bytes
    def __init__(self, grammar: _Optional[str] = ..., hash: _Optional[bytes] = ...) -> None: ...

class CancelSequence(_message.Message):
    __slots__ = ("request_id", "attempt", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    reason: _types_pb2.FinishReason
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("request_id", "attempt", "offset")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    offset: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("frame",)
    FRAME_FIELD_NUMBER: _ClassVar[int]
    frame: int
    def __init__(self, frame: _Optional[int] = ...) -> None: ...

class ServeResponse(_message.Message):
    __slots__ = ("generation", "accepted", "rejected", "step", "report", "attached", "usage")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    accepted: _containers.RepeatedCompositeFieldContainer[SequenceAccepted]
    rejected: _containers.RepeatedCompositeFieldContainer[SequenceRejected]
    step: StepFrame
    report: Report
    attached: _containers.RepeatedCompositeFieldContainer[SequenceAttached]
    usage: UsageReport
    def __init__(self, generation: _Optional[int] = ..., accepted: _Optional[_Iterable[_Union[SequenceAccepted, _Mapping]]] = ..., rejected: _Optional[_Iterable[_Union[SequenceRejected, _Mapping]]] = ..., step: _Optional[_Union[StepFrame, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., attached: _Optional[_Iterable[_Union[SequenceAttached, _Mapping]]] = ..., usage: _Optional[_Union[UsageReport, _Mapping]] = ...) -> None: ...

class UsageReport(_message.Message):
    __slots__ = ("accounts",)
    ACCOUNTS_FIELD_NUMBER: _ClassVar[int]
    accounts: _containers.RepeatedCompositeFieldContainer[AccountUsage]
    def __init__(self, accounts: _Optional[_Iterable[_Union[AccountUsage, _Mapping]]] = ...) -> None: ...

class AccountUsage(_message.Message):
    __slots__ = ("day", "tenant", "priority", "adapter_name", "is_system", "used")
    DAY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_NAME_FIELD_NUMBER: _ClassVar[int]
    IS_SYSTEM_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    day: int
    tenant: str
    priority: _types_pb2.PriorityClass
    adapter_name: str
    is_system: bool
    used: _types_pb2.ResourceUsage
    def __init__(self, day: _Optional[int] = ..., tenant: _Optional[str] = ..., priority: _Optional[_Union[_types_pb2.PriorityClass, str]] = ..., adapter_name: _Optional[str] = ..., is_system: _Optional[bool] = ..., used: _Optional[_Union[_types_pb2.ResourceUsage, _Mapping]] = ...) -> None: ...

class SequenceAttached(_message.Message):
    __slots__ = ("request_id", "attempt", "slots", "submit", "started", "cached_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    submit: Submit
    started: bool
    cached_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., started: _Optional[bool] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class SequenceAccepted(_message.Message):
    __slots__ = ("request_id", "attempt", "slots")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ...) -> None: ...

class SequenceRejected(_message.Message):
    __slots__ = ("request_id", "attempt", "reason", "detail")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    reason: RejectReason
    detail: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[_Union[RejectReason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class StepFrame(_message.Message):
    __slots__ = ("frame", "step", "slots", "offsets", "token_ids", "started", "finished", "logprobs", "paused", "detached", "prompt_logprobs")
    FRAME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    frame: int
    step: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    started: _containers.RepeatedCompositeFieldContainer[SequenceStarted]
    finished: _containers.RepeatedCompositeFieldContainer[SequenceFinished]
    logprobs: _containers.RepeatedCompositeFieldContainer[SequenceLogprobs]
    paused: _containers.RepeatedScalarFieldContainer[int]
    detached: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[SequencePromptLogprobs]
    def __init__(self, frame: _Optional[int] = ..., step: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., offsets: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., started: _Optional[_Iterable[_Union[SequenceStarted, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[SequenceFinished, _Mapping]]] = ..., logprobs: _Optional[_Iterable[_Union[SequenceLogprobs, _Mapping]]] = ..., paused: _Optional[_Iterable[int]] = ..., detached: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[SequencePromptLogprobs, _Mapping]]] = ...) -> None: ...

class SequenceStarted(_message.Message):
    __slots__ = ("slot", "cached_tokens")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    cached_tokens: int
    def __init__(self, slot: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class SequenceFinished(_message.Message):
    __slots__ = ("slot", "reason", "stop_token_id", "error", "constraint_unfinished", "pooled", "used")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    slot: int
    reason: _types_pb2.FinishReason
    stop_token_id: int
    error: str
    constraint_unfinished: bool
    pooled: _containers.RepeatedScalarFieldContainer[float]
    used: _types_pb2.ResourceUsage
    def __init__(self, slot: _Optional[int] = ..., reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., error: _Optional[str] = ..., constraint_unfinished: _Optional[bool] = ..., pooled: _Optional[_Iterable[float]] = ..., used: _Optional[_Union[_types_pb2.ResourceUsage, _Mapping]] = ...) -> None: ...

class SequencePromptLogprobs(_message.Message):
    __slots__ = ("slot", "position", "values")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    slot: int
    position: int
    values: _containers.RepeatedCompositeFieldContainer[_types_pb2.PositionLogprobs]
    def __init__(self, slot: _Optional[int] = ..., position: _Optional[int] = ..., values: _Optional[_Iterable[_Union[_types_pb2.PositionLogprobs, _Mapping]]] = ...) -> None: ...

class SequenceLogprobs(_message.Message):
    __slots__ = ("slot", "offset", "values")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    slot: int
    offset: int
    values: _types_pb2.PositionLogprobs
    def __init__(self, slot: _Optional[int] = ..., offset: _Optional[int] = ..., values: _Optional[_Union[_types_pb2.PositionLogprobs, _Mapping]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("seq", "budget_blocks", "total_blocks", "used_blocks", "cached_blocks", "budget_sequences", "num_running", "num_waiting", "waiting_prefill_tokens", "held", "draining", "step_ms", "output_tokens_per_s", "prefill_tokens_per_s", "num_steps", "exposed_host_ms", "device_busy_fraction", "device_busy_s", "elapsed_s", "reserve_quantile", "num_preemptions", "computed_tokens", "recomputed_tokens", "num_preempted", "used_host_blocks", "constraint", "bounds", "steps_per_s", "drafts", "adapters", "host_prefixes", "saved_blocks", "states", "checkpoint_names")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_HOST_MS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BUSY_FRACTION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BUSY_S_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    RESERVE_QUANTILE_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    USED_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    HOST_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    SAVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_NAMES_FIELD_NUMBER: _ClassVar[int]
    seq: int
    budget_blocks: int
    total_blocks: int
    used_blocks: int
    cached_blocks: int
    budget_sequences: int
    num_running: int
    num_waiting: int
    waiting_prefill_tokens: int
    held: _containers.RepeatedCompositeFieldContainer[HeldSequence]
    draining: bool
    step_ms: float
    output_tokens_per_s: float
    prefill_tokens_per_s: float
    num_steps: int
    exposed_host_ms: float
    device_busy_fraction: float
    device_busy_s: float
    elapsed_s: float
    reserve_quantile: float
    num_preemptions: int
    computed_tokens: int
    recomputed_tokens: int
    num_preempted: int
    used_host_blocks: int
    constraint: _types_pb2.StepConstraint
    bounds: _containers.RepeatedCompositeFieldContainer[_types_pb2.StepBound]
    steps_per_s: float
    drafts: _types_pb2.DraftCounts
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterStatus]
    host_prefixes: _types_pb2.HostPrefixes
    saved_blocks: int
    states: _types_pb2.RecurrentStates
    checkpoint_names: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seq: _Optional[int] = ..., budget_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., budget_sequences: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., waiting_prefill_tokens: _Optional[int] = ..., held: _Optional[_Iterable[_Union[HeldSequence, _Mapping]]] = ..., draining: _Optional[bool] = ..., step_ms: _Optional[float] = ..., output_tokens_per_s: _Optional[float] = ..., prefill_tokens_per_s: _Optional[float] = ..., num_steps: _Optional[int] = ..., exposed_host_ms: _Optional[float] = ..., device_busy_fraction: _Optional[float] = ..., device_busy_s: _Optional[float] = ..., elapsed_s: _Optional[float] = ..., reserve_quantile: _Optional[float] = ..., num_preemptions: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., num_preempted: _Optional[int] = ..., used_host_blocks: _Optional[int] = ..., constraint: _Optional[_Union[_types_pb2.StepConstraint, str]] = ..., bounds: _Optional[_Iterable[_Union[_types_pb2.StepBound, _Mapping]]] = ..., steps_per_s: _Optional[float] = ..., drafts: _Optional[_Union[_types_pb2.DraftCounts, _Mapping]] = ..., adapters: _Optional[_Iterable[_Union[AdapterStatus, _Mapping]]] = ..., host_prefixes: _Optional[_Union[_types_pb2.HostPrefixes, _Mapping]] = ..., saved_blocks: _Optional[int] = ..., states: _Optional[_Union[_types_pb2.RecurrentStates, _Mapping]] = ..., checkpoint_names: _Optional[_Iterable[int]] = ...) -> None: ...

class AdapterStatus(_message.Message):
    __slots__ = ("name", "hash", "rank", "resident")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    hash: str
    rank: int
    resident: bool
    def __init__(self, name: _Optional[str] = ..., hash: _Optional[str] = ..., rank: _Optional[int] = ..., resident: _Optional[bool] = ...) -> None: ...

class HeldSequence(_message.Message):
    __slots__ = ("request_id", "attempt", "reserved_blocks", "phase", "adapter_hash")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_HASH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    reserved_blocks: int
    phase: _stats_pb2.SequencePhase
    adapter_hash: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reserved_blocks: _Optional[int] = ..., phase: _Optional[_Union[_stats_pb2.SequencePhase, str]] = ..., adapter_hash: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: int
    def __init__(self, timeout_s: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_held",)
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    num_held: int
    def __init__(self, num_held: _Optional[int] = ...) -> None: ...

class WatchStepsRequest(_message.Message):
    __slots__ = ("interval_ms", "want_sequences", "after_iter")
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    WANT_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    AFTER_ITER_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    want_sequences: bool
    after_iter: int
    def __init__(self, interval_ms: _Optional[int] = ..., want_sequences: _Optional[bool] = ..., after_iter: _Optional[int] = ...) -> None: ...

class WatchStepsResponse(_message.Message):
    __slots__ = ("generation", "iterations", "sequences")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    generation: int
    iterations: _containers.RepeatedCompositeFieldContainer[_stats_pb2.IterationStats]
    sequences: _containers.RepeatedCompositeFieldContainer[_stats_pb2.SequenceStats]
    def __init__(self, generation: _Optional[int] = ..., iterations: _Optional[_Iterable[_Union[_stats_pb2.IterationStats, _Mapping]]] = ..., sequences: _Optional[_Iterable[_Union[_stats_pb2.SequenceStats, _Mapping]]] = ...) -> None: ...
