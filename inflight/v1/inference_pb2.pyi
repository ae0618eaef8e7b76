import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from inflight.v1 import stats_pb2 as _stats_pb2
from inflight.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_WAITING: _ClassVar[RequestState]
    REQUEST_STATE_PLACED: _ClassVar[RequestState]
    REQUEST_STATE_ENDED: _ClassVar[RequestState]

class WaitReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAIT_REASON_UNSPECIFIED: _ClassVar[WaitReason]
    WAIT_REASON_BLOCKS: _ClassVar[WaitReason]
    WAIT_REASON_SEAT: _ClassVar[WaitReason]
    WAIT_REASON_FAIRNESS: _ClassVar[WaitReason]
    WAIT_REASON_ORDER: _ClassVar[WaitReason]
    WAIT_REASON_CLASS: _ClassVar[WaitReason]
    WAIT_REASON_TENANT_LIMIT: _ClassVar[WaitReason]
    WAIT_REASON_HELD_LINE: _ClassVar[WaitReason]
    WAIT_REASON_EXECUTOR: _ClassVar[WaitReason]
    WAIT_REASON_ADAPTER: _ClassVar[WaitReason]
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_WAITING: RequestState
REQUEST_STATE_PLACED: RequestState
REQUEST_STATE_ENDED: RequestState
WAIT_REASON_UNSPECIFIED: WaitReason
WAIT_REASON_BLOCKS: WaitReason
WAIT_REASON_SEAT: WaitReason
WAIT_REASON_FAIRNESS: WaitReason
WAIT_REASON_ORDER: WaitReason
WAIT_REASON_CLASS: WaitReason
WAIT_REASON_TENANT_LIMIT: WaitReason
WAIT_REASON_HELD_LINE: WaitReason
WAIT_REASON_EXECUTOR: WaitReason
WAIT_REASON_ADAPTER: WaitReason

class TextPair(_message.Message):
    __slots__ = ("query", "document", "instruction")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    query: str
    document: str
    instruction: str
    def __init__(self, query: _Optional[str] = ..., document: _Optional[str] = ..., instruction: _Optional[str] = ...) -> None: ...

class EmbedInput(_message.Message):
    __slots__ = ("text", "token_ids", "pair")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    pair: TextPair
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., pair: _Optional[_Union[TextPair, _Mapping]] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("model", "inputs", "dimensions", "tenant", "priority", "cache", "deadline")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    model: str
    inputs: _containers.RepeatedCompositeFieldContainer[EmbedInput]
    dimensions: int
    tenant: str
    priority: _types_pb2.PriorityClass
    cache: CacheOptions
    deadline: _duration_pb2.Duration
    def __init__(self, model: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[EmbedInput, _Mapping]]] = ..., dimensions: _Optional[int] = ..., tenant: _Optional[str] = ..., priority: _Optional[_Union[_types_pb2.PriorityClass, str]] = ..., cache: _Optional[_Union[CacheOptions, _Mapping]] = ..., deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Pooled(_message.Message):
    __slots__ = ("values", "prompt_tokens", "cached_tokens")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    prompt_tokens: int
    cached_tokens: int
    def __init__(self, values: _Optional[_Iterable[float]] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("model", "pooling", "results")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    pooling: _types_pb2.Pooling
    results: _containers.RepeatedCompositeFieldContainer[Pooled]
    def __init__(self, model: _Optional[str] = ..., pooling: _Optional[_Union[_types_pb2.Pooling, _Mapping]] = ..., results: _Optional[_Iterable[_Union[Pooled, _Mapping]]] = ...) -> None: ...

class ContentPart(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: _containers.RepeatedCompositeFieldContainer[ContentPart]
    name: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    reasoning: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[_Iterable[_Union[ContentPart, _Mapping]]] = ..., name: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., reasoning: _Optional[str] = ...) -> None: ...

class Function(_message.Message):
    __slots__ = ("name", "description", "parameters", "strict", "input_regex", "input_grammar")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    INPUT_REGEX_FIELD_NUMBER: _ClassVar[int]
    INPUT_GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters: str
    strict: bool
    input_regex: str
    input_grammar: str
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[str] = ..., strict: _Optional[bool] = ..., input_regex: _Optional[str] = ..., input_grammar: _Optional[str] = ...) -> None: ...

class ToolChoice(_message.Message):
    __slots__ = ("mode", "names", "parallel")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[ToolChoice.Mode]
        MODE_NONE: _ClassVar[ToolChoice.Mode]
        MODE_AUTO: _ClassVar[ToolChoice.Mode]
        MODE_REQUIRED: _ClassVar[ToolChoice.Mode]
    MODE_UNSPECIFIED: ToolChoice.Mode
    MODE_NONE: ToolChoice.Mode
    MODE_AUTO: ToolChoice.Mode
    MODE_REQUIRED: ToolChoice.Mode
    MODE_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_FIELD_NUMBER: _ClassVar[int]
    mode: ToolChoice.Mode
    names: _containers.RepeatedScalarFieldContainer[str]
    parallel: bool
    def __init__(self, mode: _Optional[_Union[ToolChoice.Mode, str]] = ..., names: _Optional[_Iterable[str]] = ..., parallel: _Optional[bool] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "tools", "template_kwargs", "functions", "reasoning_effort", "thinking_token_budget")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    FUNCTIONS_FIELD_NUMBER: _ClassVar[int]
    REASONING_EFFORT_FIELD_NUMBER: _ClassVar[int]
    THINKING_TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: _containers.RepeatedCompositeFieldContainer[_struct_pb2.Struct]
    template_kwargs: _struct_pb2.Struct
    functions: _containers.RepeatedCompositeFieldContainer[Function]
    reasoning_effort: str
    thinking_token_budget: int
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[_Union[_struct_pb2.Struct, _Mapping]]] = ..., template_kwargs: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., functions: _Optional[_Iterable[_Union[Function, _Mapping]]] = ..., reasoning_effort: _Optional[str] = ..., thinking_token_budget: _Optional[int] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class OutputOptions(_message.Message):
    __slots__ = ("text", "token_ids", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "coalesce_ms", "top_prompt_logprobs", "stream_interval", "parts", "resources")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    COALESCE_MS_FIELD_NUMBER: _ClassVar[int]
    TOP_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    text: bool
    token_ids: bool
    logprobs: bool
    top_logprobs: int
    prompt_logprobs: bool
    echo: bool
    coalesce_ms: int
    top_prompt_logprobs: int
    stream_interval: int
    parts: bool
    resources: bool
    def __init__(self, text: _Optional[bool] = ..., token_ids: _Optional[bool] = ..., logprobs: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[bool] = ..., echo: _Optional[bool] = ..., coalesce_ms: _Optional[int] = ..., top_prompt_logprobs: _Optional[int] = ..., stream_interval: _Optional[int] = ..., parts: _Optional[bool] = ..., resources: _Optional[bool] = ...) -> None: ...

class Deadlines(_message.Message):
    __slots__ = ("first_token", "total")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    first_token: _duration_pb2.Duration
    total: _duration_pb2.Duration
    def __init__(self, first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., total: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class CacheOptions(_message.Message):
    __slots__ = ("salt", "bypass")
    SALT_FIELD_NUMBER: _ClassVar[int]
    BYPASS_FIELD_NUMBER: _ClassVar[int]
    salt: str
    bypass: bool
    def __init__(self, salt: _Optional[str] = ..., bypass: _Optional[bool] = ...) -> None: ...

class PriorOutput(_message.Message):
    __slots__ = ("output_ids", "text_bytes")
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    text_bytes: int
    def __init__(self, output_ids: _Optional[_Iterable[int]] = ..., text_bytes: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "text_bytes", "token_ids", "chat", "sampling", "stopping", "n", "best_of", "constraint", "output", "adapter_id", "priority", "tenant", "deadlines", "session_id", "cache", "idempotency_key", "detach", "resume_ttl", "want_queue_events", "truncate_prompt_tokens", "metadata", "prior_output", "tool_choice", "inter_token_target_ms", "max_drafts", "exact_resume")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DEADLINES_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    RESUME_TTL_FIELD_NUMBER: _ClassVar[int]
    WANT_QUEUE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    PRIOR_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    EXACT_RESUME_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    text_bytes: bytes
    token_ids: TokenIds
    chat: Chat
    sampling: _types_pb2.SamplingParams
    stopping: _types_pb2.StoppingParams
    n: int
    best_of: int
    constraint: _types_pb2.Constraint
    output: OutputOptions
    adapter_id: str
    priority: _types_pb2.PriorityClass
    tenant: str
    deadlines: Deadlines
    session_id: str
    cache: CacheOptions
    idempotency_key: str
    detach: bool
    resume_ttl: _duration_pb2.Duration
    want_queue_events: bool
    truncate_prompt_tokens: int
    metadata: _containers.ScalarMap[str, str]
    prior_output: PriorOutput
    tool_choice: ToolChoice
    inter_token_target_ms: int
    max_drafts: int
    exact_resume: bool
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., text_bytes: _Optional[bytes] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_types_pb2.StoppingParams, _Mapping]] = ..., n: _Optional[int] = ..., best_of: _Optional[int] = ..., constraint: _Optional[_Union[_types_pb2.Constraint, _Mapping]] = ..., output: _Optional[_Union[OutputOptions, _Mapping]] = ..., adapter_id: _Optional[str] = ..., priority: _Optional[_Union[_types_pb2.PriorityClass, str]] = ..., tenant: _Optional[str] = ..., deadlines: _Optional[_Union[Deadlines, _Mapping]] = ..., session_id: _Optional[str] = ..., cache: _Optional[_Union[CacheOptions, _Mapping]] = ..., idempotency_key: _Optional[str] = ..., detach: _Optional[bool] = ..., resume_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., want_queue_events: _Optional[bool] = ..., truncate_prompt_tokens: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ..., prior_output: _Optional[_Union[PriorOutput, _Mapping]] = ..., tool_choice: _Optional[_Union[ToolChoice, _Mapping]] = ..., inter_token_target_ms: _Optional[int] = ..., max_drafts: _Optional[int] = ..., exact_resume: _Optional[bool] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("request_id", "resume_token", "prompt_tokens", "sampling", "max_tokens", "has_parts", "unenforced_functions", "ignored_schema_words")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HAS_PARTS_FIELD_NUMBER: _ClassVar[int]
    UNENFORCED_FUNCTIONS_FIELD_NUMBER: _ClassVar[int]
    IGNORED_SCHEMA_WORDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    resume_token: str
    prompt_tokens: int
    sampling: _types_pb2.SamplingParams
    max_tokens: int
    has_parts: bool
    unenforced_functions: _containers.RepeatedCompositeFieldContainer[_types_pb2.UnenforcedFunction]
    ignored_schema_words: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_id: _Optional[str] = ..., resume_token: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., max_tokens: _Optional[int] = ..., has_parts: _Optional[bool] = ..., unenforced_functions: _Optional[_Iterable[_Union[_types_pb2.UnenforcedFunction, _Mapping]]] = ..., ignored_schema_words: _Optional[_Iterable[str]] = ...) -> None: ...

class Queued(_message.Message):
    __slots__ = ("position", "estimated_wait", "request_id", "resume_token")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_WAIT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    position: int
    estimated_wait: _duration_pb2.Duration
    request_id: str
    resume_token: str
    def __init__(self, position: _Optional[int] = ..., estimated_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., request_id: _Optional[str] = ..., resume_token: _Optional[str] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("executor_id", "cached_tokens", "queue")
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    executor_id: str
    cached_tokens: int
    queue: _duration_pb2.Duration
    def __init__(self, executor_id: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., queue: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("offset", "token_ids", "logprobs", "first_text_bytes", "first_is_special")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_IS_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    offset: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.PositionLogprobs]
    first_text_bytes: bytes
    first_is_special: bool
    def __init__(self, offset: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.PositionLogprobs, _Mapping]]] = ..., first_text_bytes: _Optional[bytes] = ..., first_is_special: _Optional[bool] = ...) -> None: ...

class ToolCallPart(_message.Message):
    __slots__ = ("index", "id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class OutputPart(_message.Message):
    __slots__ = ("reasoning", "content", "tool_call")
    REASONING_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    reasoning: str
    content: str
    tool_call: ToolCallPart
    def __init__(self, reasoning: _Optional[str] = ..., content: _Optional[str] = ..., tool_call: _Optional[_Union[ToolCallPart, _Mapping]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("choice", "offset", "num_tokens", "token_ids", "text", "logprobs", "parts")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    offset: int
    num_tokens: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.PositionLogprobs]
    parts: _containers.RepeatedCompositeFieldContainer[OutputPart]
    def __init__(self, choice: _Optional[int] = ..., offset: _Optional[int] = ..., num_tokens: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.PositionLogprobs, _Mapping]]] = ..., parts: _Optional[_Iterable[_Union[OutputPart, _Mapping]]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("choice", "reason", "stop", "stop_token_id", "constraint_unfinished", "parts", "num_tool_calls")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    reason: _types_pb2.FinishReason
    stop: str
    stop_token_id: int
    constraint_unfinished: bool
    parts: _containers.RepeatedCompositeFieldContainer[OutputPart]
    num_tool_calls: int
    def __init__(self, choice: _Optional[int] = ..., reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., stop: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., constraint_unfinished: _Optional[bool] = ..., parts: _Optional[_Iterable[_Union[OutputPart, _Mapping]]] = ..., num_tool_calls: _Optional[int] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("usage", "timing")
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    usage: _types_pb2.Usage
    timing: _types_pb2.Timing
    def __init__(self, usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., timing: _Optional[_Union[_types_pb2.Timing, _Mapping]] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("kind", "text")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Notice.Kind]
        KIND_MIGRATED: _ClassVar[Notice.Kind]
        KIND_PAUSED: _ClassVar[Notice.Kind]
    KIND_UNSPECIFIED: Notice.Kind
    KIND_MIGRATED: Notice.Kind
    KIND_PAUSED: Notice.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: Notice.Kind
    text: str
    def __init__(self, kind: _Optional[_Union[Notice.Kind, str]] = ..., text: _Optional[str] = ...) -> None: ...

class StreamEvent(_message.Message):
    __slots__ = ("seq", "attempt", "accepted", "queued", "started", "delta", "finished", "done", "notice", "prompt")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    seq: int
    attempt: int
    accepted: Accepted
    queued: Queued
    started: Started
    delta: Delta
    finished: Finished
    done: Done
    notice: Notice
    prompt: Prompt
    def __init__(self, seq: _Optional[int] = ..., attempt: _Optional[int] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., queued: _Optional[_Union[Queued, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: StreamEvent
    def __init__(self, event: _Optional[_Union[StreamEvent, _Mapping]] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("request_id", "resume_token", "offsets", "text_bytes")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    resume_token: str
    offsets: _containers.RepeatedScalarFieldContainer[int]
    text_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., resume_token: _Optional[str] = ..., offsets: _Optional[_Iterable[int]] = ..., text_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: StreamEvent
    def __init__(self, event: _Optional[_Union[StreamEvent, _Mapping]] = ...) -> None: ...

class CancelStream(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GenerateManyRequest(_message.Message):
    __slots__ = ("stream", "generate", "resume", "cancel", "hold", "timeout", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STREAM_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    stream: int
    generate: GenerateRequest
    resume: ResumeRequest
    cancel: CancelStream
    hold: bool
    timeout: _duration_pb2.Duration
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, stream: _Optional[int] = ..., generate: _Optional[_Union[GenerateRequest, _Mapping]] = ..., resume: _Optional[_Union[ResumeRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelStream, _Mapping]] = ..., hold: _Optional[bool] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class StreamEnded(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: bytes
    def __init__(self, status: _Optional[bytes] = ...) -> None: ...

class StreamUpdate(_message.Message):
    __slots__ = ("stream", "event", "ended")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    stream: int
    event: StreamEvent
    ended: StreamEnded
    def __init__(self, stream: _Optional[int] = ..., event: _Optional[_Union[StreamEvent, _Mapping]] = ..., ended: _Optional[_Union[StreamEnded, _Mapping]] = ...) -> None: ...

class GenerateManyResponse(_message.Message):
    __slots__ = ("updates",)
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    updates: _containers.RepeatedCompositeFieldContainer[StreamUpdate]
    def __init__(self, updates: _Optional[_Iterable[_Union[StreamUpdate, _Mapping]]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id", "resume_token", "model", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    resume_token: str
    model: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., resume_token: _Optional[str] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: RequestState
    def __init__(self, state: _Optional[_Union[RequestState, str]] = ...) -> None: ...

class GetRequestRequest(_message.Message):
    __slots__ = ("request_id", "resume_token", "model", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    resume_token: str
    model: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., resume_token: _Optional[str] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class GetRequestResponse(_message.Message):
    __slots__ = ("request_id", "state", "position", "waiting_for", "estimated_wait", "executor_id", "output_tokens", "wait_reason", "needed_blocks", "available_blocks", "priority", "times_passed", "variant", "step_constraint")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_WAIT_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAIT_REASON_FIELD_NUMBER: _ClassVar[int]
    NEEDED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMES_PASSED_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    STEP_CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: RequestState
    position: int
    waiting_for: str
    estimated_wait: _duration_pb2.Duration
    executor_id: str
    output_tokens: int
    wait_reason: WaitReason
    needed_blocks: int
    available_blocks: int
    priority: _types_pb2.PriorityClass
    times_passed: int
    variant: str
    step_constraint: _types_pb2.StepConstraint
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[_Union[RequestState, str]] = ..., position: _Optional[int] = ..., waiting_for: _Optional[str] = ..., estimated_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., executor_id: _Optional[str] = ..., output_tokens: _Optional[int] = ..., wait_reason: _Optional[_Union[WaitReason, str]] = ..., needed_blocks: _Optional[int] = ..., available_blocks: _Optional[int] = ..., priority: _Optional[_Union[_types_pb2.PriorityClass, str]] = ..., times_passed: _Optional[int] = ..., variant: _Optional[str] = ..., step_constraint: _Optional[_Union[_types_pb2.StepConstraint, str]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "add_special_tokens", "want_token_names", "add_generation_prompt")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WANT_TOKEN_NAMES_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: Chat
    add_special_tokens: bool
    want_token_names: bool
    add_generation_prompt: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ..., want_token_names: _Optional[bool] = ..., add_generation_prompt: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "token_names", "context_length")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_NAMES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_names: _containers.RepeatedScalarFieldContainer[str]
    context_length: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., token_names: _Optional[_Iterable[str]] = ..., context_length: _Optional[int] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids", "skip_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "context_length", "vocabulary_size", "eos_token_ids", "default_sampling", "has_chat_template", "num_executors", "adapters", "pooling")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    NUM_EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    name: str
    context_length: int
    vocabulary_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    default_sampling: _types_pb2.SamplingParams
    has_chat_template: bool
    num_executors: int
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    pooling: _types_pb2.Pooling
    def __init__(self, name: _Optional[str] = ..., context_length: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., default_sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., has_chat_template: _Optional[bool] = ..., num_executors: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., pooling: _Optional[_Union[_types_pb2.Pooling, _Mapping]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "hash", "rank", "num_executors", "num_resident")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESIDENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    hash: str
    rank: int
    num_executors: int
    num_resident: int
    def __init__(self, name: _Optional[str] = ..., hash: _Optional[str] = ..., rank: _Optional[int] = ..., num_executors: _Optional[int] = ..., num_resident: _Optional[int] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "tenant")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    tenant: str
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., tenant: _Optional[str] = ...) -> None: ...

class GetCapacityRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ExecutorCapacity(_message.Message):
    __slots__ = ("executor_id", "model", "accepting", "seats_total", "seats_used", "num_waiting", "blocks_total", "blocks_used", "blocks_reserved", "blocks_cached", "block_size", "output_tokens_per_s", "step_ms", "batching", "num_steps", "exposed_host_ms", "device_busy_fraction", "device_busy_s", "elapsed_s", "scheduler_policy", "reserve_quantile", "num_preemptions", "computed_tokens", "recomputed_tokens", "num_preempted", "host_blocks_used", "host_blocks_total", "constraint", "bounds", "steps_per_s", "drafts", "host_prefixes", "states")
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ACCEPTING_FIELD_NUMBER: _ClassVar[int]
    SEATS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SEATS_USED_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_RESERVED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    BATCHING_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_HOST_MS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BUSY_FRACTION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BUSY_S_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_POLICY_FIELD_NUMBER: _ClassVar[int]
    RESERVE_QUANTILE_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    HOST_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    executor_id: str
    model: str
    accepting: bool
    seats_total: int
    seats_used: int
    num_waiting: int
    blocks_total: int
    blocks_used: int
    blocks_reserved: int
    blocks_cached: int
    block_size: int
    output_tokens_per_s: float
    step_ms: float
    batching: _types_pb2.BatchingMode
    num_steps: int
    exposed_host_ms: float
    device_busy_fraction: float
    device_busy_s: float
    elapsed_s: float
    scheduler_policy: _types_pb2.SchedulerPolicy
    reserve_quantile: float
    num_preemptions: int
    computed_tokens: int
    recomputed_tokens: int
    num_preempted: int
    host_blocks_used: int
    host_blocks_total: int
    constraint: _types_pb2.StepConstraint
    bounds: _containers.RepeatedCompositeFieldContainer[_types_pb2.StepBound]
    steps_per_s: float
    drafts: _types_pb2.DraftCounts
    host_prefixes: _types_pb2.HostPrefixes
    states: _types_pb2.RecurrentStates
    def __init__(self, executor_id: _Optional[str] = ..., model: _Optional[str] = ..., accepting: _Optional[bool] = ..., seats_total: _Optional[int] = ..., seats_used: _Optional[int] = ..., num_waiting: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_used: _Optional[int] = ..., blocks_reserved: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., block_size: _Optional[int] = ..., output_tokens_per_s: _Optional[float] = ..., step_ms: _Optional[float] = ..., batching: _Optional[_Union[_types_pb2.BatchingMode, str]] = ..., num_steps: _Optional[int] = ..., exposed_host_ms: _Optional[float] = ..., device_busy_fraction: _Optional[float] = ..., device_busy_s: _Optional[float] = ..., elapsed_s: _Optional[float] = ..., scheduler_policy: _Optional[_Union[_types_pb2.SchedulerPolicy, str]] = ..., reserve_quantile: _Optional[float] = ..., num_preemptions: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., num_preempted: _Optional[int] = ..., host_blocks_used: _Optional[int] = ..., host_blocks_total: _Optional[int] = ..., constraint: _Optional[_Union[_types_pb2.StepConstraint, str]] = ..., bounds: _Optional[_Iterable[_Union[_types_pb2.StepBound, _Mapping]]] = ..., steps_per_s: _Optional[float] = ..., drafts: _Optional[_Union[_types_pb2.DraftCounts, _Mapping]] = ..., host_prefixes: _Optional[_Union[_types_pb2.HostPrefixes, _Mapping]] = ..., states: _Optional[_Union[_types_pb2.RecurrentStates, _Mapping]] = ...) -> None: ...

class QueueDepth(_message.Message):
    __slots__ = ("model", "priority", "num_requests")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    priority: _types_pb2.PriorityClass
    num_requests: int
    def __init__(self, model: _Optional[str] = ..., priority: _Optional[_Union[_types_pb2.PriorityClass, str]] = ..., num_requests: _Optional[int] = ...) -> None: ...

class EstimateQuality(_message.Message):
    __slots__ = ("model", "num_estimates", "mean_error", "correction")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_ESTIMATES_FIELD_NUMBER: _ClassVar[int]
    MEAN_ERROR_FIELD_NUMBER: _ClassVar[int]
    CORRECTION_FIELD_NUMBER: _ClassVar[int]
    model: str
    num_estimates: int
    mean_error: float
    correction: float
    def __init__(self, model: _Optional[str] = ..., num_estimates: _Optional[int] = ..., mean_error: _Optional[float] = ..., correction: _Optional[float] = ...) -> None: ...

class VariantCapacity(_message.Message):
    __slots__ = ("model", "variant", "share", "num_requests", "num_refused", "num_ended", "output_tokens", "ttft_p50_ms", "ttft_p99_ms", "inter_token_p50_ms", "inter_token_p99_ms")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    NUM_ENDED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_P50_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_P99_MS_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_P50_MS_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_P99_MS_FIELD_NUMBER: _ClassVar[int]
    model: str
    variant: str
    share: float
    num_requests: int
    num_refused: int
    num_ended: int
    output_tokens: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    inter_token_p50_ms: float
    inter_token_p99_ms: float
    def __init__(self, model: _Optional[str] = ..., variant: _Optional[str] = ..., share: _Optional[float] = ..., num_requests: _Optional[int] = ..., num_refused: _Optional[int] = ..., num_ended: _Optional[int] = ..., output_tokens: _Optional[int] = ..., ttft_p50_ms: _Optional[float] = ..., ttft_p99_ms: _Optional[float] = ..., inter_token_p50_ms: _Optional[float] = ..., inter_token_p99_ms: _Optional[float] = ...) -> None: ...

class GetCapacityResponse(_message.Message):
    __slots__ = ("executors", "queues", "variants", "estimates", "unused")
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    VARIANTS_FIELD_NUMBER: _ClassVar[int]
    ESTIMATES_FIELD_NUMBER: _ClassVar[int]
    UNUSED_FIELD_NUMBER: _ClassVar[int]
    executors: _containers.RepeatedCompositeFieldContainer[ExecutorCapacity]
    queues: _containers.RepeatedCompositeFieldContainer[QueueDepth]
    variants: _containers.RepeatedCompositeFieldContainer[VariantCapacity]
    estimates: _containers.RepeatedCompositeFieldContainer[EstimateQuality]
    unused: _containers.RepeatedCompositeFieldContainer[UnusedExecutor]
    def __init__(self, executors: _Optional[_Iterable[_Union[ExecutorCapacity, _Mapping]]] = ..., queues: _Optional[_Iterable[_Union[QueueDepth, _Mapping]]] = ..., variants: _Optional[_Iterable[_Union[VariantCapacity, _Mapping]]] = ..., estimates: _Optional[_Iterable[_Union[EstimateQuality, _Mapping]]] = ..., unused: _Optional[_Iterable[_Union[UnusedExecutor, _Mapping]]] = ...) -> None: ...

class UnusedExecutor(_message.Message):
    __slots__ = ("executor_id", "model", "address", "reason")
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    executor_id: str
    model: str
    address: str
    reason: str
    def __init__(self, executor_id: _Optional[str] = ..., model: _Optional[str] = ..., address: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ("model", "interval_ms", "want_iterations", "want_sequences")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    WANT_ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    WANT_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    model: str
    interval_ms: int
    want_iterations: bool
    want_sequences: bool
    def __init__(self, model: _Optional[str] = ..., interval_ms: _Optional[int] = ..., want_iterations: _Optional[bool] = ..., want_sequences: _Optional[bool] = ...) -> None: ...

class ExecutorStats(_message.Message):
    __slots__ = ("capacity", "iterations", "sequences")
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    capacity: ExecutorCapacity
    iterations: _containers.RepeatedCompositeFieldContainer[_stats_pb2.IterationStats]
    sequences: _containers.RepeatedCompositeFieldContainer[_stats_pb2.SequenceStats]
    def __init__(self, capacity: _Optional[_Union[ExecutorCapacity, _Mapping]] = ..., iterations: _Optional[_Iterable[_Union[_stats_pb2.IterationStats, _Mapping]]] = ..., sequences: _Optional[_Iterable[_Union[_stats_pb2.SequenceStats, _Mapping]]] = ...) -> None: ...

class TenantQueue(_message.Message):
    __slots__ = ("model", "tenant", "priority", "num_requests", "num_tokens", "longest_wait_ms")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    model: str
    tenant: str
    priority: _types_pb2.PriorityClass
    num_requests: int
    num_tokens: int
    longest_wait_ms: int
    def __init__(self, model: _Optional[str] = ..., tenant: _Optional[str] = ..., priority: _Optional[_Union[_types_pb2.PriorityClass, str]] = ..., num_requests: _Optional[int] = ..., num_tokens: _Optional[int] = ..., longest_wait_ms: _Optional[int] = ...) -> None: ...

class ModelLatency(_message.Message):
    __slots__ = ("model", "num_ended", "num_refused", "output_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "inter_token_p50_ms", "inter_token_p99_ms")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_ENDED_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_P50_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_P99_MS_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_P50_MS_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_P99_MS_FIELD_NUMBER: _ClassVar[int]
    model: str
    num_ended: int
    num_refused: int
    output_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    inter_token_p50_ms: float
    inter_token_p99_ms: float
    def __init__(self, model: _Optional[str] = ..., num_ended: _Optional[int] = ..., num_refused: _Optional[int] = ..., output_tokens_per_s: _Optional[float] = ..., ttft_p50_ms: _Optional[float] = ..., ttft_p99_ms: _Optional[float] = ..., inter_token_p50_ms: _Optional[float] = ..., inter_token_p99_ms: _Optional[float] = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("router_id", "timestamp_ms", "executors", "queues", "latencies")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    timestamp_ms: int
    executors: _containers.RepeatedCompositeFieldContainer[ExecutorStats]
    queues: _containers.RepeatedCompositeFieldContainer[TenantQueue]
    latencies: _containers.RepeatedCompositeFieldContainer[ModelLatency]
    def __init__(self, router_id: _Optional[str] = ..., timestamp_ms: _Optional[int] = ..., executors: _Optional[_Iterable[_Union[ExecutorStats, _Mapping]]] = ..., queues: _Optional[_Iterable[_Union[TenantQueue, _Mapping]]] = ..., latencies: _Optional[_Iterable[_Union[ModelLatency, _Mapping]]] = ...) -> None: ...

class GetUsageRequest(_message.Message):
    __slots__ = ("model", "since", "until", "tenant")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    model: str
    since: str
    until: str
    tenant: str
    def __init__(self, model: _Optional[str] = ..., since: _Optional[str] = ..., until: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class UsageLine(_message.Message):
    __slots__ = ("day", "model", "tenant", "priority", "adapter", "executor_class", "is_system", "used", "cost")
    DAY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_CLASS_FIELD_NUMBER: _ClassVar[int]
    IS_SYSTEM_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    day: str
    model: str
    tenant: str
    priority: _types_pb2.PriorityClass
    adapter: str
    executor_class: str
    is_system: bool
    used: _types_pb2.ResourceUsage
    cost: float
    def __init__(self, day: _Optional[str] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., priority: _Optional[_Union[_types_pb2.PriorityClass, str]] = ..., adapter: _Optional[str] = ..., executor_class: _Optional[str] = ..., is_system: _Optional[bool] = ..., used: _Optional[_Union[_types_pb2.ResourceUsage, _Mapping]] = ..., cost: _Optional[float] = ...) -> None: ...

class GetUsageResponse(_message.Message):
    __slots__ = ("lines", "currency", "complete_since_unix_ms")
    LINES_FIELD_NUMBER: _ClassVar[int]
    CURRENCY_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_SINCE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedCompositeFieldContainer[UsageLine]
    currency: str
    complete_since_unix_ms: int
    def __init__(self, lines: _Optional[_Iterable[_Union[UsageLine, _Mapping]]] = ..., currency: _Optional[str] = ..., complete_since_unix_ms: _Optional[int] = ...) -> None: ...
