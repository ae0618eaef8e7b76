"""Content of an executor's reports to routers."""

from __future__ import annotations

from dataclasses import replace

from inflight.executor.scheduler.limits import Batching, SchedulerPolicy
from inflight.executor.scheduler.sequence import FinishReason
from inflight.executor.scheduler.step_constraint import StepConstraint
from inflight.executor.serving.report import CONSTRAINT_PROTO, policy_proto
from inflight.executor.serving.router_session import FINISH_REASON_PROTO
from inflight.v1 import types_pb2
from tests.support.scheduler.scheduling import LIMITS


def test_every_constraint_and_every_end_has_its_own_number_on_the_wire() -> None:
    assert set(CONSTRAINT_PROTO) == set(StepConstraint)
    assert len(set(CONSTRAINT_PROTO.values())) == len(StepConstraint)
    assert set(FINISH_REASON_PROTO) == set(FinishReason)
    assert len(set(FINISH_REASON_PROTO.values())) == len(FinishReason)


def test_policy_is_told_as_it_acts_and_a_static_batch_is_always_guaranteed() -> None:
    overcommitted = replace(LIMITS, policy=SchedulerPolicy.MAX_UTILIZATION)

    assert policy_proto(LIMITS) == types_pb2.SCHEDULER_POLICY_GUARANTEED_NO_EVICT
    assert policy_proto(overcommitted) == types_pb2.SCHEDULER_POLICY_MAX_UTILIZATION
    static = replace(overcommitted, batching=Batching.STATIC)
    assert policy_proto(static) == types_pb2.SCHEDULER_POLICY_GUARANTEED_NO_EVICT
