import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from inflight.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouterContext(_message.Message):
    __slots__ = ("tenant", "request_id", "model", "stop", "include_stop", "wants_text", "wants_token_ids", "digest", "detach", "resume_ttl", "arrived_unix_ms", "operation", "echo", "num_choices", "num_sent_choices", "hides_logprobs", "stream_interval", "reservation_tokens", "answer_format", "adapter_id", "stop_token_ids", "unenforced_functions", "ignored_schema_words", "wants_resources")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    WANTS_TEXT_FIELD_NUMBER: _ClassVar[int]
    WANTS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    RESUME_TTL_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    NUM_SENT_CHOICES_FIELD_NUMBER: _ClassVar[int]
    HIDES_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FORMAT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    UNENFORCED_FUNCTIONS_FIELD_NUMBER: _ClassVar[int]
    IGNORED_SCHEMA_WORDS_FIELD_NUMBER: _ClassVar[int]
    WANTS_RESOURCES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    request_id: str
    model: str
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop: bool
    wants_text: bool
    wants_token_ids: bool
    digest: bytes
    detach: bool
    resume_ttl: _duration_pb2.Duration
    arrived_unix_ms: int
    operation: str
    echo: bool
    num_choices: int
    num_sent_choices: int
    hides_logprobs: bool
    stream_interval: int
    reservation_tokens: int
    answer_format: str
    adapter_id: str
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    unenforced_functions: _containers.RepeatedCompositeFieldContainer[_types_pb2.UnenforcedFunction]
    ignored_schema_words: _containers.RepeatedScalarFieldContainer[str]
    wants_resources: bool
    def __init__(self, tenant: _Optional[str] = ..., request_id: _Optional[str] = ..., model: _Optional[str] = ..., stop: _Optional[_Iterable[str]] = ..., include_stop: _Optional[bool] = ..., wants_text: _Optional[bool] = ..., wants_token_ids: _Optional[bool] = ..., digest: _Optional[bytes] = ..., detach: _Optional[bool] = ..., resume_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., arrived_unix_ms: _Optional[int] = ..., operation: _Optional[str] = ..., echo: _Optional[bool] = ..., num_choices: _Optional[int] = ..., num_sent_choices: _Optional[int] = ..., hides_logprobs: _Optional[bool] = ..., stream_interval: _Optional[int] = ..., reservation_tokens: _Optional[int] = ..., answer_format: _Optional[str] = ..., adapter_id: _Optional[str] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., unenforced_functions: _Optional[_Iterable[_Union[_types_pb2.UnenforcedFunction, _Mapping]]] = ..., ignored_schema_words: _Optional[_Iterable[str]] = ..., wants_resources: _Optional[bool] = ...) -> None: ...
