"""Bodies of batches, and their form for clients."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from inflight.gateway.batches.endpoints import ENDPOINTS
from inflight.gateway.bodies import Body, Integer, Text, read_fields, validated
from inflight.gateway.errors import refused
from inflight.gateway.files.files import check_expiry
from inflight.gateway.store.batches import Batch

# OpenAI's only one.
COMPLETION_WINDOW = "24h"
COMPLETION_WINDOW_S = 86_400
MAX_METADATA_PAIRS = 16


class ExpiresAfter(Body):
    """How long files of results are kept."""

    anchor: str
    seconds: Integer


class BatchBody(Body):
    """The body of `POST /v1/batches`."""

    input_file_id: Text
    endpoint: Text
    completion_window: Literal["24h"]
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None,
        Field(max_length=MAX_METADATA_PAIRS),
    ] = None
    output_expires_after: ExpiresAfter | None = None

    @property
    def output_ttl_s(self) -> int | None:
        """The seconds that the client wants; None if it does not say so. Raises `ApiError`."""
        asked = self.output_expires_after
        return None if asked is None else check_expiry(asked.anchor, asked.seconds, "output_expires_after")


def parse_batch(raw: bytes) -> BatchBody:
    """Parses a body. Raises `ApiError`."""
    body = validated(BatchBody, read_fields(raw, {}))
    if body.endpoint not in ENDPOINTS:
        raise refused("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
    return body


def batch_object(batch: Batch) -> dict[str, Any]:
    """Returns a batch in OpenAI's form."""
    # The gateway that cancelled it may have ended before it wrote so.
    status = "cancelling" if batch.cancelled and batch.status in ("validating", "in_progress") else batch.status
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model or None,
        "errors": json.loads(batch.errors) if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": COMPLETION_WINDOW,
        "status": status,
        "output_file_id": batch.output_file_id or None,
        "error_file_id": batch.error_file_id or None,
        "created_at": batch.created,
        "expires_at": batch.expires,
        **{f"{name}_at": getattr(batch, f"{name}_at") or None for name in times},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": json.loads(batch.metadata) if batch.metadata else None,
        "usage": _usage(json.loads(batch.usage)) if batch.usage else None,
    }


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Returns the sum of the answers' `usage`, with the names that batches have."""
    inputs, outputs = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": inputs,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": outputs,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage.get("total_tokens", inputs + outputs),
    }
