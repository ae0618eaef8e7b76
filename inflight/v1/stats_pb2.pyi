from inflight.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SequencePhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEQUENCE_PHASE_UNSPECIFIED: _ClassVar[SequencePhase]
    SEQUENCE_PHASE_STANDBY: _ClassVar[SequencePhase]
    SEQUENCE_PHASE_PREFILL: _ClassVar[SequencePhase]
    SEQUENCE_PHASE_DECODE: _ClassVar[SequencePhase]
    SEQUENCE_PHASE_PREEMPTED: _ClassVar[SequencePhase]
    SEQUENCE_PHASE_PREPARING: _ClassVar[SequencePhase]
SEQUENCE_PHASE_UNSPECIFIED: SequencePhase
SEQUENCE_PHASE_STANDBY: SequencePhase
SEQUENCE_PHASE_PREFILL: SequencePhase
SEQUENCE_PHASE_DECODE: SequencePhase
SEQUENCE_PHASE_PREEMPTED: SequencePhase
SEQUENCE_PHASE_PREPARING: SequencePhase

class IterationStats(_message.Message):
    __slots__ = ("iter", "timestamp_ms", "iter_latency_ms", "device_ms", "exposed_host_ms", "parts", "num_active_requests", "num_queued_requests", "max_num_active_requests", "kv_cache_stats", "inflight_batching_stats", "constraint")
    ITER_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    ITER_LATENCY_MS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_HOST_MS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_STATS_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_BATCHING_STATS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    iter: int
    timestamp_ms: int
    iter_latency_ms: float
    device_ms: float
    exposed_host_ms: float
    parts: _containers.RepeatedCompositeFieldContainer[StepPart]
    num_active_requests: int
    num_queued_requests: int
    max_num_active_requests: int
    kv_cache_stats: KvCacheStats
    inflight_batching_stats: InflightBatchingStats
    constraint: _types_pb2.StepConstraint
    def __init__(self, iter: _Optional[int] = ..., timestamp_ms: _Optional[int] = ..., iter_latency_ms: _Optional[float] = ..., device_ms: _Optional[float] = ..., exposed_host_ms: _Optional[float] = ..., parts: _Optional[_Iterable[_Union[StepPart, _Mapping]]] = ..., num_active_requests: _Optional[int] = ..., num_queued_requests: _Optional[int] = ..., max_num_active_requests: _Optional[int] = ..., kv_cache_stats: _Optional[_Union[KvCacheStats, _Mapping]] = ..., inflight_batching_stats: _Optional[_Union[InflightBatchingStats, _Mapping]] = ..., constraint: _Optional[_Union[_types_pb2.StepConstraint, str]] = ...) -> None: ...

class StepPart(_message.Message):
    __slots__ = ("name", "ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    ms: float
    def __init__(self, name: _Optional[str] = ..., ms: _Optional[float] = ...) -> None: ...

class KvCacheStats(_message.Message):
    __slots__ = ("max_num_blocks", "free_num_blocks", "used_num_blocks", "evictable_num_blocks", "reserved_num_blocks", "tokens_per_block", "prefix_query_tokens", "prefix_hit_tokens", "cache_hit_rate", "used_host_blocks")
    MAX_NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    USED_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    max_num_blocks: int
    free_num_blocks: int
    used_num_blocks: int
    evictable_num_blocks: int
    reserved_num_blocks: int
    tokens_per_block: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    cache_hit_rate: float
    used_host_blocks: int
    def __init__(self, max_num_blocks: _Optional[int] = ..., free_num_blocks: _Optional[int] = ..., used_num_blocks: _Optional[int] = ..., evictable_num_blocks: _Optional[int] = ..., reserved_num_blocks: _Optional[int] = ..., tokens_per_block: _Optional[int] = ..., prefix_query_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., cache_hit_rate: _Optional[float] = ..., used_host_blocks: _Optional[int] = ...) -> None: ...

class InflightBatchingStats(_message.Message):
    __slots__ = ("num_scheduled_requests", "num_context_requests", "num_gen_requests", "num_paused_requests", "num_boarded_requests", "num_completed_requests", "num_ctx_tokens", "num_gen_tokens")
    NUM_SCHEDULED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTEXT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_GEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PAUSED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_BOARDED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPLETED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_CTX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_scheduled_requests: int
    num_context_requests: int
    num_gen_requests: int
    num_paused_requests: int
    num_boarded_requests: int
    num_completed_requests: int
    num_ctx_tokens: int
    num_gen_tokens: int
    def __init__(self, num_scheduled_requests: _Optional[int] = ..., num_context_requests: _Optional[int] = ..., num_gen_requests: _Optional[int] = ..., num_paused_requests: _Optional[int] = ..., num_boarded_requests: _Optional[int] = ..., num_completed_requests: _Optional[int] = ..., num_ctx_tokens: _Optional[int] = ..., num_gen_tokens: _Optional[int] = ...) -> None: ...

class SequenceStats(_message.Message):
    __slots__ = ("request_id", "choice_index", "tenant", "phase", "seat", "prompt_tokens", "computed_tokens", "output_tokens", "num_blocks", "reserved_blocks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SEAT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice_index: int
    tenant: str
    phase: SequencePhase
    seat: int
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    num_blocks: int
    reserved_blocks: int
    def __init__(self, request_id: _Optional[str] = ..., choice_index: _Optional[int] = ..., tenant: _Optional[str] = ..., phase: _Optional[_Union[SequencePhase, str]] = ..., seat: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., reserved_blocks: _Optional[int] = ...) -> None: ...
