"""Agreement of docs/statuses.md with the code, for every RPC and every reason."""

from __future__ import annotations

from inflight.common.errors import STATUS_OF_REASON, Reason
from inflight.v1 import inference_pb2
from tools.reference.statuses import COMMON, NO_REASON, documented


def test_every_rpc_has_its_statuses() -> None:
    rpcs = {rpc.name for rpc in inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods}
    assert set(documented()) == {COMMON, "ExecutorService", "GRPCInferenceService", *rpcs}


def test_every_reason_has_the_status_that_the_page_says() -> None:
    rows = {row for section in documented().values() for row in section}
    assert {(reason, status) for status, reason in rows if reason != NO_REASON} == {
        (reason.value, STATUS_OF_REASON[reason].name) for reason in Reason
    }
