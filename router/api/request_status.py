"""Answers to `GetRequest`: the state of a request, in fields and in a sentence."""

from __future__ import annotations

from inflight.router.executors.link import ExecutorLink
from inflight.router.ledger.types import Explanation, LedgerState, PrefixHolder, WaitReason
from inflight.router.stream.request_stream import RequestStream
from inflight.v1 import inference_pb2, stats_pb2, types_pb2

REQUEST_STATE_PROTO: dict[LedgerState, inference_pb2.RequestState] = {
    LedgerState.WAITING: inference_pb2.REQUEST_STATE_WAITING,
    LedgerState.LOST: inference_pb2.REQUEST_STATE_WAITING,
    LedgerState.PLACED: inference_pb2.REQUEST_STATE_PLACED,
    LedgerState.ENDED: inference_pb2.REQUEST_STATE_ENDED,
}

WAIT_REASON_PROTO: dict[WaitReason, inference_pb2.WaitReason] = {
    one: getattr(inference_pb2, f"WAIT_REASON_{one.name}") for one in WaitReason
}


# What a request without a seat waits for on its executor.
SEATLESS = {
    stats_pb2.SEQUENCE_PHASE_STANDBY: "waits on {} for a seat (standby)",
    stats_pb2.SEQUENCE_PHASE_PREEMPTED: "waits on {} to get its seat back (preempted)",
}


def request_standing(
    request_id: str,
    ledger_id: str,
    explanation: Explanation,
    link: ExecutorLink | None,
    stream: RequestStream | None,
) -> inference_pb2.GetRequestResponse:
    """Returns the answer. `link` is the link to the executor that has the request; `stream` is its stream if this
    router serves it.

    To the ledger a request on an executor is placed, with a seat or without. To its client a request without a seat
    waits.
    """
    response = inference_pb2.GetRequestResponse(
        request_id=request_id,
        state=REQUEST_STATE_PROTO[explanation.state],
        position=explanation.position,
        waiting_for=waiting_for(explanation),
        executor_id=explanation.executor_id or "",
        needed_blocks=explanation.needed_blocks,
        available_blocks=explanation.available_blocks,
        priority=types_pb2.PriorityClass.Name(explanation.priority_class),
        times_passed=explanation.times_passed,
    )
    if explanation.wait_reason is not None:
        response.wait_reason = WAIT_REASON_PROTO[explanation.wait_reason]
    if explanation.estimated_wait_ms is not None:
        response.estimated_wait.FromMilliseconds(explanation.estimated_wait_ms)
    phase = _phase_without_seat(ledger_id, explanation, link, stream)
    if phase in SEATLESS:
        response.state = inference_pb2.REQUEST_STATE_WAITING
        response.wait_reason = inference_pb2.WAIT_REASON_SEAT
        response.waiting_for = SEATLESS[phase].format(explanation.executor_id)
    if stream is not None:
        response.output_tokens = len(stream.output_ids)
    if link is not None and link.report is not None:
        response.step_constraint = link.report.constraint
    return response


def _phase_without_seat(
    ledger_id: str, explanation: Explanation, link: ExecutorLink | None, stream: RequestStream | None
) -> stats_pb2.SequencePhase:
    """Returns STANDBY, PREPARING or PREEMPTED; unspecified for a request that has a seat, that is on no executor, or of
    which nothing is known.

    The executor's report comes first: it also covers requests that other routers serve.
    """
    if explanation.state is not LedgerState.PLACED:
        return stats_pb2.SEQUENCE_PHASE_UNSPECIFIED
    for one in () if link is None or link.report is None else link.report.held:
        if (one.request_id, one.attempt) == (ledger_id, explanation.attempt) and one.phase:
            return one.phase
    if stream is None or not stream.stands_by:
        return stats_pb2.SEQUENCE_PHASE_UNSPECIFIED
    return stats_pb2.SEQUENCE_PHASE_PREEMPTED if stream.is_preempted else stats_pb2.SEQUENCE_PHASE_STANDBY


def waiting_for(explanation: Explanation) -> str:
    """Returns what a request waits for, as text for people; empty if it does not wait."""
    if explanation.state is LedgerState.LOST:
        return "its executor was lost; it returns to the queue"
    if explanation.state is not LedgerState.WAITING or explanation.wait_reason is None:
        return ""
    passed = f"; bypassed {explanation.times_passed} times" if explanation.times_passed else ""
    return _sentence(explanation, explanation.wait_reason) + passed + _prefix_sentence(explanation.prefix_holder)


def _prefix_sentence(holder: PrefixHolder | None) -> str:
    if holder is None:
        return ""
    waits = f"prompts there take {holder.prefill_ms:,} ms, {max(0, holder.tolerated_ms):,} ms are tolerated"
    stays = "stays with" if holder.prefill_ms <= holder.tolerated_ms else "no longer waits for"
    return f"; {stays} {holder.executor_id}, which has its prefix: {waits}"


def _sentence(explanation: Explanation, reason: WaitReason) -> str:
    needed, available = explanation.needed_blocks, explanation.available_blocks
    match reason:
        case WaitReason.BLOCKS:
            return f"waits for KV blocks: needs {needed}, at most {available} can be reserved now"
        case WaitReason.SEAT:
            return "waits for a seat: all seats that it could use are taken"
        case WaitReason.FAIRNESS:
            return "waits for its tenant's turn: tenants that were served less go first"
        case WaitReason.ORDER:
            return "waits behind requests of its tenant with an earlier deadline or arrival"
        case WaitReason.CLASS:
            return "waits behind requests of a higher class"
        case WaitReason.TENANT_LIMIT:
            return f"waits because tenant {explanation.tenant!r} runs as many requests as it may (max_running)"
        case WaitReason.HELD_LINE:
            return "waits because an executor is kept free for a request that was bypassed too often"
        case WaitReason.EXECUTOR:
            return "waits for an executor: no executor reports"
        case WaitReason.ADAPTER:
            return "waits for an adapter slot: requests with other adapters use all of them"
