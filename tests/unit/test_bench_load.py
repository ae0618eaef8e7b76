"""The load generator against a router whose answers the test writes down."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest

from inflight import AsyncClient
from inflight.bench.targets import load
from inflight.bench.targets.load import run_workload
from inflight.bench.workloads.plan import GATE_TOKENS, PlannedRequest, Workload
from inflight.common.errors import Reason, RequestError
from inflight.v1 import inference_pb2
from tests.unit.scripted_router import Script, ScriptedRouter, delta, serving, speak

Events = Iterator[inference_pb2.StreamEvent]


class CountingRouter(ScriptedRouter):
    """One executor of two seats whose capacity follows the requests that arrive."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self._lock = threading.Lock()
        self.capacity.executors.add(seats_total=2)

    def count(self, change: int) -> None:
        with self._lock:
            self.capacity.executors[0].num_waiting += change


def workload(*output_tokens: int) -> Workload:
    return Workload("mixed", tuple(PlannedRequest((1, 2, number), number, 0.0) for number in output_tokens))


def answer(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Events:
    yield from speak(["x"] * request.stopping.max_tokens)


async def test_every_request_is_sent_as_planned_and_counted() -> None:
    router = ScriptedRouter(answer)
    with serving(router) as address:
        async with AsyncClient(address) as client:
            run = await run_workload(client, workload(3, 5), mode="inflight", round_number=2)

    sent = [router.requests.get_nowait() for _ in range(2)]
    assert {request.stopping.max_tokens: tuple(request.token_ids.ids) for request in sent} == {
        3: (1, 2, 3),
        5: (1, 2, 5),
    }
    assert all(request.stopping.ignore_eos and request.sampling.temperature == 0 for request in sent)
    assert (run.mode, run.round, run.errors) == ("inflight", 2, ())
    assert (run.measures.num_requests, run.measures.num_failed, run.measures.output_tokens) == (2, 0, 8)
    assert run.measures.ttft_p50_ms is not None
    assert run.measures.inter_token_p50_ms is not None
    assert run.samples


async def test_executor_is_held_until_the_first_batch_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "GATE_TIMEOUT_S", 60.0)
    held, released = threading.Event(), threading.Event()

    num_waiting_at_release = []

    def release() -> None:
        num_waiting_at_release.append(router.capacity.executors[0].num_waiting)
        router.count(-1)
        released.set()

    def hold_or_answer(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Events:
        if request.stopping.max_tokens == GATE_TOKENS:
            context.add_callback(release)
            router.count(+1)
            yield delta("x", 0)
            held.set()
            released.wait(timeout=60)
        else:
            assert held.is_set(), "a request was sent before the executor was held"
            router.count(+1)
            assert released.wait(timeout=60), "the executor was never released"
            yield from answer(request, context)
            router.count(-1)

    router = CountingRouter(hold_or_answer)
    with serving(router) as address:
        async with AsyncClient(address) as client:
            run = await run_workload(client, workload(3, 5, 7), mode="static", round_number=1)

    assert num_waiting_at_release[0] >= 1 + 2, "the first batch of two seats was not full"
    assert (run.measures.num_failed, run.measures.output_tokens) == (0, 15)


async def test_what_arrives_over_time_is_not_held_up() -> None:
    router = CountingRouter(answer)
    planned = (PlannedRequest((1,), 2, 0.0), PlannedRequest((1,), 2, 0.001))
    with serving(router) as address:
        async with AsyncClient(address) as client:
            run = await run_workload(client, Workload("chat", planned), mode="static", round_number=1)

    assert run.measures.num_failed == 0
    assert router.requests.qsize() == 2


async def test_refused_and_short_requests_count_as_failed_with_the_reason() -> None:
    def refuse_or_cut(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Events:
        if request.stopping.max_tokens == 3:
            raise RequestError(Reason.QUEUE_FULL, "the queue is full")
        yield from speak(["x"] * 2)

    with serving(ScriptedRouter(refuse_or_cut)) as address:
        async with AsyncClient(address) as client:
            run = await run_workload(client, workload(3, 5), mode="static", round_number=1)

    assert run.measures.num_failed == 2
    assert any("the queue is full" in error for error in run.errors)
    assert "2 tokens came of 5" in run.errors
