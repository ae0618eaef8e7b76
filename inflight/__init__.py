"""The Python client of inflight: `from inflight import Client, AsyncClient`.

A name is loaded when it is first used, so importing the generated messages (`inflight.v1`) does not load the client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inflight.access import AccessOptions
    from inflight.aio import AsyncClient
    from inflight.aio_stream import AsyncStream
    from inflight.beams.search import Beam
    from inflight.catalogue import (
        Adapter,
        Capacity,
        EstimateQuality,
        ExecutorCapacity,
        Model,
        Pooling,
        QueueDepth,
        RequestStanding,
        RequestState,
        UnusedExecutor,
        VariantCapacity,
    )
    from inflight.embeddings.calls import Embedding, EmbedOptions, Score
    from inflight.errors import FieldError, InflightError
    from inflight.events import (
        Accepted,
        Choice,
        Completion,
        ContentPart,
        Delta,
        Done,
        Event,
        Finished,
        FinishReason,
        Logprob,
        Notice,
        PositionLogprobs,
        Prompt,
        Queued,
        ReasoningPart,
        Resources,
        Resumed,
        Started,
        Timing,
        ToolCall,
        ToolCallPart,
        UnenforcedFunction,
        Usage,
    )
    from inflight.requests import ChatMessage, GenerateOptions
    from inflight.statistics import (
        ExecutorStatistics,
        Iteration,
        ModelLatency,
        SequenceOnExecutor,
        Statistics,
        TenantQueue,
        TenantUsage,
        UsageLine,
    )
    from inflight.sync import Client
    from inflight.sync_stream import Stream

__all__ = [
    "Accepted",
    "AccessOptions",
    "Adapter",
    "AsyncClient",
    "AsyncStream",
    "Beam",
    "Capacity",
    "ChatMessage",
    "Choice",
    "Client",
    "Completion",
    "ContentPart",
    "Delta",
    "Done",
    "EmbedOptions",
    "Embedding",
    "EstimateQuality",
    "Event",
    "ExecutorCapacity",
    "ExecutorStatistics",
    "FieldError",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "InflightError",
    "Iteration",
    "Logprob",
    "Model",
    "ModelLatency",
    "Notice",
    "Pooling",
    "PositionLogprobs",
    "Prompt",
    "QueueDepth",
    "Queued",
    "ReasoningPart",
    "RequestStanding",
    "RequestState",
    "Resources",
    "Resumed",
    "Score",
    "SequenceOnExecutor",
    "Started",
    "Statistics",
    "Stream",
    "TenantQueue",
    "TenantUsage",
    "Timing",
    "ToolCall",
    "ToolCallPart",
    "UnenforcedFunction",
    "UnusedExecutor",
    "Usage",
    "UsageLine",
    "VariantCapacity",
]

# Searched in this order, so that no module is loaded that a name does not need.
_MODULES = (
    "errors",
    "access",
    "requests",
    "embeddings.calls",
    "events",
    "beams.search",
    "catalogue",
    "statistics",
    "sync_stream",
    "sync",
    "aio_stream",
    "aio",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            loaded = import_module(f"inflight.{module}")
            if hasattr(loaded, name):
                return getattr(loaded, name)
    raise AttributeError(f"module 'inflight' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
