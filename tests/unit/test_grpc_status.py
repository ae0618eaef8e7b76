"""Conversion of errors to gRPC statuses."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from inflight.common.errors import Reason, RequestError
from inflight.common.rpc.status import abort, to_rpc_status


class GoneClient:
    """The context of a call whose client has gone."""

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any) -> None:
        raise grpc.aio.InternalError("Failed to send its status")


async def test_error_without_a_client_ends_the_call_as_a_cancel_does() -> None:
    context: Any = GoneClient()
    with pytest.raises(asyncio.CancelledError):
        await abort(context, RequestError(Reason.STALLED, "not read"))


def test_cause_of_an_error_is_for_the_log_alone() -> None:
    error = RequestError(Reason.STORE_UNAVAILABLE, "does not answer", cause="connecting to 10.0.0.7:6379")
    assert str(error) == "does not answer (connecting to 10.0.0.7:6379)"
    assert b"10.0.0.7" not in to_rpc_status(error).SerializeToString()
