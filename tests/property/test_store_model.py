"""The store on a real Redis decides as the plain model does, whatever is called in whatever order: `store_machine`."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.store_machine import StoreMachine
from tests.support.examples import examples


@pytest.mark.timeout(600)  # to find a failure takes seconds, to shrink it minutes
def test_scripts_decide_as_the_model_does(redis_url: str, redis_admin_url: str) -> None:
    """Invariants tested: equal results, equal events, equal state; sums, indexes and states agree."""

    class StoreMachineOnRedis(StoreMachine):
        def __init__(self) -> None:
            super().__init__(redis_url, redis_admin_url)

    run_state_machine_as_test(
        StoreMachineOnRedis,
        settings=settings(
            max_examples=examples(100),
            stateful_step_count=10,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
