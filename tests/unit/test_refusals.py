"""Errors that clients get when admission refuses them."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2

from inflight.common.errors import Reason, RequestError
from inflight.common.rpc.status import to_rpc_status
from inflight.router.ledger.types import Refused
from inflight.router.request.errors import RETRY_AFTER_MS, refusal, shut_out, unknown_tenant


def detail_of(error: RequestError, kind: type[Message]) -> Message | None:
    for packed in to_rpc_status(error).details:
        found = kind()
        if packed.Unpack(found):
            return found
    return None


@pytest.mark.parametrize(
    ("refused", "limit"),
    [
        (Refused(Reason.QUEUE_FULL, "tenant max_queue_tokens", 250), "tenant max_queue_tokens"),
        (Refused(Reason.QUEUE_FULL, retry_after_ms=250), "max_queue_requests"),
        (Refused(Reason.RATE_LIMITED, "tenant tokens_per_s", 250), "tenant tokens_per_s"),
        (Refused(Reason.DEADLINE_UNMEETABLE, retry_after_ms=250), "deadline"),
    ],
)
def test_reached_limit_is_exhausted_and_named_with_the_time_to_try_again(refused: Refused, limit: str) -> None:
    error = refusal(refused)
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    quota = detail_of(error, error_details_pb2.QuotaFailure)
    assert isinstance(quota, error_details_pb2.QuotaFailure)
    assert quota.violations[0].subject == limit
    retry = detail_of(error, error_details_pb2.RetryInfo)
    assert isinstance(retry, error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToMilliseconds() == 250


def test_refusal_without_a_time_names_ours() -> None:
    assert refusal(Refused(Reason.QUEUE_FULL)).retry_after_ms == RETRY_AFTER_MS
    assert refusal(Refused(Reason.RATE_LIMITED, retry_after_ms=0)).retry_after_ms == 0


def test_what_never_fits_is_not_worth_another_try() -> None:
    error = refusal(Refused(Reason.NEVER_FITS))
    assert error.code is grpc.StatusCode.FAILED_PRECONDITION
    assert error.retry_after_ms is None


def test_without_executor_it_is_unavailable() -> None:
    assert refusal(Refused(Reason.NO_EXECUTOR)).code is grpc.StatusCode.UNAVAILABLE


def test_unknown_tenant_may_not_and_one_that_is_shut_out_may_nothing() -> None:
    assert unknown_tenant("acme").code is grpc.StatusCode.PERMISSION_DENIED
    assert "'acme'" in str(unknown_tenant("acme"))
    error = shut_out("acme")
    assert (error.code, error.quota, error.retry_after_ms) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "tenant max_running",
        None,
    )
