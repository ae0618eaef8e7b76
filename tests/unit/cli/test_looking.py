"""`inflight models`, `status`, `explain` and `cancel`: what is there, and where a request stands."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from inflight.cli.main import main
from inflight.v1 import inference_pb2, types_pb2
from tests.unit.scripted_router import ScriptedRouter, asked, seconds

# --- models and status


def test_models_are_listed(output: Callable[..., str]) -> None:
    assert "smol" in output("models")
    assert json.loads(output("models", "--json"))[0]["context_length"] == 2048


@pytest.mark.parametrize("name", ["status", "capacity"])
def test_status_shows_seats_blocks_and_queues(output: Callable[..., str], name: str, router: ScriptedRouter) -> None:
    router.capacity = inference_pb2.GetCapacityResponse(
        executors=[
            inference_pb2.ExecutorCapacity(
                executor_id="e0", accepting=True, seats_used=3, seats_total=4, blocks_used=17, blocks_total=64
            ),
            inference_pb2.ExecutorCapacity(executor_id="e1"),
        ],
        queues=[inference_pb2.QueueDepth(model="smol", priority=types_pb2.PRIORITY_CLASS_BATCH, num_requests=5)],
    )
    shown = output(name)
    assert all(text in shown for text in ("3/4", "17/64", "e1, not accepting", "5 batch for smol"))


def test_status_of_an_empty_pool_says_so(output: Callable[..., str]) -> None:
    assert output("status") == "no executor\nno requests waiting\n"
    lists = ("executors", "queues", "variants", "estimates", "unused")
    assert json.loads(output("status", "--json")) == {name: [] for name in lists}


def test_status_shows_policy_preemptions_constraint_and_variants(
    output: Callable[..., str], router: ScriptedRouter
) -> None:
    router.capacity = inference_pb2.GetCapacityResponse(
        executors=[
            inference_pb2.ExecutorCapacity(
                executor_id="e0",
                accepting=True,
                scheduler_policy=types_pb2.SCHEDULER_POLICY_MAX_UTILIZATION,
                reserve_quantile=0.95,
                num_preemptions=1234,
                constraint=types_pb2.STEP_CONSTRAINT_STATIC_BATCH,
                bounds=[types_pb2.StepBound(constraint=types_pb2.STEP_CONSTRAINT_SEATS, num_steps=7)],
            )
        ],
        variants=[
            inference_pb2.VariantCapacity(model="smol", variant="smol-static", share=0.1, num_requests=5, ttft_p50_ms=8)
        ],
        estimates=[inference_pb2.EstimateQuality(model="smol", num_estimates=3, mean_error=0.5, correction=1.5)],
    )
    shown = output("status")
    assert all(text in shown for text in ("p95", "1234", "static batch", "smol-static", "10%", "8.0"))
    capacity = json.loads(output("status", "--json"))
    assert capacity["executors"][0]["bounds"] == {"seats": 7}
    assert capacity["variants"][0]["ttft_p99_ms"] is None
    assert capacity["estimates"][0]["correction"] == 1.5


def test_status_of_an_idle_executor_shows_no_speed(output: Callable[..., str], router: ScriptedRouter) -> None:
    router.capacity = inference_pb2.GetCapacityResponse(
        executors=[
            inference_pb2.ExecutorCapacity(
                executor_id=name,
                accepting=True,
                steps_per_s=rate,
                step_ms=86.6,
                constraint=types_pb2.STEP_CONSTRAINT_NO_WORK,
            )
            for name, rate in (("idle", 0.0), ("busy", 11.5))
        ]
    )
    rows = {line.split()[0]: line.split() for line in output("status").splitlines() if line.strip()}
    assert "86.6" in rows["busy"]
    assert "86.6" not in rows["idle"]
    assert "-" in rows["idle"]


def test_status_watch_goes_on_until_ctrl_c(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []

    def wait(interval_s: float) -> None:
        waits.append(interval_s)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("inflight.cli.status.time.sleep", wait)
    assert main(["status", "--watch", "0.5", "--address", address]) == 130
    assert waits == [0.5] * 3
    assert "no requests waiting" in capsys.readouterr().out


def test_status_refuses_a_silly_interval(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--watch", "0"]) == 2
    assert "--watch" in capsys.readouterr().err


# --- explain


def test_explain_says_what_a_request_waits_for(output: Callable[..., str], router: ScriptedRouter) -> None:
    router.standing = inference_pb2.GetRequestResponse(
        state=inference_pb2.REQUEST_STATE_WAITING,
        position=3,
        waiting_for="waits for a seat",
        wait_reason=inference_pb2.WAIT_REASON_SEAT,
        estimated_wait=seconds(2.5),
        priority=types_pb2.PRIORITY_CLASS_BATCH,
    )
    assert output("explain", "mine", "--model", "smol").splitlines() == [
        "mine: waiting",
        "  waits for a seat",
        "  requests ahead of it: 3, class batch",
        "  estimated wait: about 2.5 s",
    ]
    assert asked(router) == [inference_pb2.GetRequestRequest(request_id="mine", model="smol")]


def test_explain_of_a_request_that_stands_by_says_where_and_for_what(
    output: Callable[..., str], router: ScriptedRouter
) -> None:
    router.standing = inference_pb2.GetRequestResponse(
        state=inference_pb2.REQUEST_STATE_WAITING,
        executor_id="e0",
        waiting_for="waits on e0 for a seat (standby)",
        wait_reason=inference_pb2.WAIT_REASON_SEAT,
        priority=types_pb2.PRIORITY_CLASS_STANDARD,
        step_constraint=types_pb2.STEP_CONSTRAINT_SEATS,
    )
    assert output("explain", "mine").splitlines() == ["mine: waiting", "  waits on e0 for a seat (standby)"]


def test_explain_of_a_placed_request_names_executor_variant_and_constraint(
    output: Callable[..., str], router: ScriptedRouter
) -> None:
    router.standing = inference_pb2.GetRequestResponse(
        state=inference_pb2.REQUEST_STATE_PLACED,
        executor_id="e0",
        output_tokens=9,
        variant="smol-static",
        step_constraint=types_pb2.STEP_CONSTRAINT_STATIC_BATCH,
    )
    assert output("explain", "mine").splitlines() == [
        "mine: on e0 by smol-static",
        "  9 tokens so far",
        "  latest step of its executor was bound by: static batch",
    ]
    assert json.loads(output("explain", "mine", "--json"))["state"] == "placed"


# --- cancel and explain


@pytest.mark.parametrize("name", ["cancel", "explain"])
def test_a_request_of_another_tenant_is_named_with_its_token_and_tenant(
    name: str, address: str, router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    whose = ["--tenant", "acme", "--model", "smol", "--address", address]
    assert main([name, "r7", "--resume-token", "secret", *whose]) == 0
    monkeypatch.setenv("INFLIGHT_RESUME_TOKEN", "secret")
    assert main([name, "r7", *whose]) == 0
    first, second = asked(router)
    assert first == second
    assert (first.request_id, first.resume_token, first.tenant, first.model) == ("r7", "secret", "acme", "smol")


def test_cancel_says_where_the_request_was(output: Callable[..., str]) -> None:
    assert output("cancel", "r7") == "r7: cancelled; it was placed\n"
