"""The reported constraint of an executor: the same for queue and executor, idle, full and with standby."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.router.ledger.types import ClassQueue, ExecutorStanding
from inflight.router.stats.capacity import admission_constraint
from inflight.v1 import executor_pb2, types_pb2

DESCRIPTION = executor_pb2.DescribeResponse(max_num_sequences=16, block_size=16)
EMPTY = (ClassQueue(0, 0),) * 3
# 14 requests of 160 tokens, so of ten blocks each.
WAITING = (ClassQueue(0, 0), ClassQueue(14, 14 * 160), ClassQueue(0, 0))

NO_WORK, SEATS, BLOCKS = (
    types_pb2.STEP_CONSTRAINT_NO_WORK,
    types_pb2.STEP_CONSTRAINT_SEATS,
    types_pb2.STEP_CONSTRAINT_BLOCKS,
)
TOKENS, TWIN = types_pb2.STEP_CONSTRAINT_TOKENS, types_pb2.STEP_CONSTRAINT_TWIN
NOT_KNOWN = types_pb2.STEP_CONSTRAINT_UNSPECIFIED


def report(newest: types_pb2.StepConstraint, num_running: int = 0, **fields: Any) -> executor_pb2.Report:
    return executor_pb2.Report(constraint=newest, num_running=num_running, **fields)


def standing(reserved_blocks: int = 0, reserved_sequences: int = 0, accepting: bool = True) -> ExecutorStanding:
    return ExecutorStanding("e", 1, 100, 100, 17, reserved_blocks, reserved_sequences, accepting, live=True)


@pytest.mark.parametrize(
    ("said", "queues", "expected"),
    [
        pytest.param(report(SEATS), EMPTY, NO_WORK, id="idle, and its last step was full"),
        pytest.param(report(NOT_KNOWN), EMPTY, NO_WORK, id="no step was made yet"),
        pytest.param(report(NO_WORK, 3), EMPTY, NO_WORK, id="runs, and nothing waits"),
        pytest.param(report(SEATS, 16), EMPTY, NO_WORK, id="full, and nothing waits"),
        pytest.param(report(NO_WORK, 16), WAITING, SEATS, id="full, and the queue waits"),
        pytest.param(report(SEATS, 16, num_waiting=1), WAITING, SEATS, id="full, with standby and queue"),
        pytest.param(report(SEATS, 16, num_waiting=1), EMPTY, SEATS, id="full, with standby"),
        pytest.param(report(NO_WORK, 16, num_waiting=1), EMPTY, SEATS, id="full, with a standby newer than the step"),
        pytest.param(report(BLOCKS, 9, num_waiting=1), EMPTY, BLOCKS, id="the executor has no block for its standby"),
        pytest.param(report(BLOCKS, 9, num_preempted=1), EMPTY, BLOCKS, id="nor for who was preempted"),
        pytest.param(report(TWIN, 9, num_waiting=1), WAITING, TWIN, id="standby waits for the prefix of another"),
        pytest.param(report(TOKENS, 1, waiting_prefill_tokens=900), EMPTY, TOKENS, id="a long prompt is computed"),
        pytest.param(report(TOKENS, 16, waiting_prefill_tokens=9), WAITING, SEATS, id="prompts are computed, and full"),
        pytest.param(report(TOKENS, 9, num_waiting=1, waiting_prefill_tokens=9), EMPTY, TOKENS, id="no tokens for it"),
        pytest.param(report(TOKENS, 1), EMPTY, NO_WORK, id="a long prompt was computed"),
    ],
)
def test_bound_by(
    said: executor_pb2.Report, queues: tuple[ClassQueue, ...], expected: types_pb2.StepConstraint
) -> None:
    assert admission_constraint(said, DESCRIPTION, standing(), queues) == expected


@pytest.mark.parametrize(
    ("ledger", "expected"),
    [
        pytest.param(standing(reserved_blocks=95, reserved_sequences=9), BLOCKS, id="blocks are promised"),
        pytest.param(standing(reserved_blocks=40, reserved_sequences=17), SEATS, id="seats and standby are promised"),
        pytest.param(standing(reserved_blocks=40, reserved_sequences=9), NOT_KNOWN, id="the queue holds them back"),
        pytest.param(standing(reserved_blocks=95, accepting=False), NOT_KNOWN, id="it drains"),
        pytest.param(None, NOT_KNOWN, id="the ledger does not know it"),
    ],
)
def test_free_seats_while_the_queue_waits_are_explained_by_what_the_ledger_has_promised(
    ledger: ExecutorStanding | None, expected: types_pb2.StepConstraint
) -> None:
    assert admission_constraint(report(NO_WORK, 9), DESCRIPTION, ledger, WAITING) == expected


def test_executor_that_has_not_reported_is_bound_by_nothing_known() -> None:
    assert admission_constraint(None, DESCRIPTION, standing(), EMPTY) == NOT_KNOWN
