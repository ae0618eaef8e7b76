"""The shapes of traffic: the same everywhere, within their published ranges, smaller when scaled."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.bench.workloads.generate import Arrivals, build_workload
from inflight.bench.workloads.plan import Workload, WorkloadError
from inflight.bench.workloads.shapes import SHAPES, read_shape

VOCABULARY_SIZE = 49_152


def build(name: str, scale: float = 1.0, num_requests: int | None = None, seed: int = 0) -> Workload:
    return build_workload(name, vocabulary_size=VOCABULARY_SIZE, scale=scale, num_requests=num_requests, seed=seed)


@pytest.mark.parametrize("name", SHAPES)
def test_same_seed_gives_the_same_requests_and_another_seed_others(name: str) -> None:
    assert build(name) == build(name)
    assert build(name) != build(name, seed=1)


@pytest.mark.parametrize("name", SHAPES)
def test_requests_are_as_many_and_as_long_as_the_shape_says(name: str) -> None:
    shape, workload = SHAPES[name], build(name)
    lengths = [len(request.prompt_ids) for request in workload.requests]
    outputs = [request.output_tokens for request in workload.requests]
    assert len(workload.requests) == shape.num_requests
    assert shape.prompt_tokens[0] <= min(lengths) < max(lengths) <= shape.prompt_tokens[1]
    assert shape.output_tokens[0] <= min(outputs) < max(outputs) <= shape.output_tokens[1]
    assert all(0 <= token_id < VOCABULARY_SIZE for request in workload.requests for token_id in request.prompt_ids)
    assert (workload.prompt_tokens, workload.output_tokens) == (sum(lengths), sum(outputs))


def test_variant_differs_in_token_ids_alone() -> None:
    first = build("chat")
    second = build_workload("chat", vocabulary_size=VOCABULARY_SIZE, variant=1)
    for one, other in zip(first.requests, second.requests, strict=True):
        assert one.prompt_ids != other.prompt_ids
        assert len(one.prompt_ids) == len(other.prompt_ids)
        assert (one.output_tokens, one.arrival_s) == (other.output_tokens, other.arrival_s)


def test_mixed_is_a_mix() -> None:
    outputs = [request.output_tokens for request in build("mixed").requests]
    assert max(outputs) > 5 * min(outputs)


def test_scale_shrinks_lengths_and_leaves_the_number() -> None:
    full, half = build("mixed"), build("mixed", scale=0.5)
    assert len(half.requests) == len(full.requests)
    for small, large in zip(half.requests, full.requests, strict=True):
        assert small.output_tokens == round(large.output_tokens / 2)
        assert len(small.prompt_ids) == round(len(large.prompt_ids) / 2)


def test_no_request_is_scaled_to_nothing() -> None:
    tiny = build("short", scale=0.001)
    assert {(len(request.prompt_ids), request.output_tokens) for request in tiny.requests} == {(1, 1)}


def test_fewer_requests_are_the_first_ones() -> None:
    assert build("mixed", num_requests=6).requests == build("mixed").requests[:6]


def test_chat_prompts_share_their_beginning_within_a_group_only() -> None:
    requests = build("chat").requests
    prefixes = [request.prompt_ids[:64] for request in requests]
    for first in range(0, len(requests), 4):
        assert len(set(prefixes[first : first + 4])) == 1
    assert len(set(prefixes)) == len(requests) // 4
    long = [request.prompt_ids for request in requests if len(request.prompt_ids) > 200]
    assert len({prompt[128:] for prompt in long}) == len(long)


def test_chat_arrives_over_time_and_the_rest_at_once() -> None:
    arrivals = [request.arrival_s for request in build("chat").requests]
    assert arrivals == sorted(arrivals)
    assert 20 < arrivals[-1] < 50  # 64 requests at two per second
    assert {request.arrival_s for request in build("mixed").requests} == {0.0}


def test_rate_makes_arrivals_a_poisson_process_of_that_rate() -> None:
    workload = build_workload("mixed", vocabulary_size=10, num_requests=400, arrivals=Arrivals(rate_per_s=4.0))
    arrivals = [request.arrival_s for request in workload.requests]
    assert arrivals == sorted(arrivals)
    assert 80 < arrivals[-1] < 120
    assert not workload.arrives_at_once


def test_closed_loop_has_no_arrival_times_and_does_not_arrive_at_once() -> None:
    workload = build_workload("chat", vocabulary_size=10, arrivals=Arrivals(concurrency=4))
    assert workload.concurrency == 4
    assert {request.arrival_s for request in workload.requests} == {0.0}
    assert not workload.arrives_at_once


def test_shape_of_a_file_gives_requests_under_the_files_name(tmp_path: Path) -> None:
    path = tmp_path / "night.json"
    path.write_text('{"num_requests": 3, "prompt_tokens": [5, 5], "output_tokens": [2, 2], "arrivals_per_s": 1}')
    workload = build_workload(str(path), vocabulary_size=100)
    assert (workload.name, workload.prompt_tokens, workload.output_tokens) == ("night", 15, 6)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "should be an object"),
        ("{", "Invalid JSON"),
        ('{"num_requests": 1, "prompt_tokens": [1, 2]}', "output_tokens: Field required"),
        ('{"num_requests": 1, "prompt_tokens": [2, 1], "output_tokens": [1, 1]}', "prompt_tokens: .*must not be above"),
        ('{"num_requests": 0, "prompt_tokens": [1, 1], "output_tokens": [1, 1]}', "num_requests: .*greater than 0"),
        ('{"num_requests": 1, "prompt_tokens": [1, 1], "output_tokens": [1, 1], "rate": 1}', "rate: Extra inputs"),
        (
            '{"num_requests": 1, "prompt_tokens": [1, 1], "output_tokens": [1, 1], "arrivals_per_s": 0}',
            "arrivals_per_s: .*greater than 0",
        ),
    ],
)
def test_wrong_shape_is_refused_with_its_file_and_reason(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=says):
        read_shape(path)
    with pytest.raises(WorkloadError, match="No such file"):
        read_shape(tmp_path / "gone.json")


def test_trace_is_replayed_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl"
    path.write_text(
        '{"arrival_s": 2.5, "prompt_tokens": 4, "output_tokens": 8}\n\n{"prompt_ids": [7, 8], "output_tokens": 1}\n'
    )
    first, second = build_workload(str(path), vocabulary_size=100).requests
    assert (first.prompt_ids, first.output_tokens, first.arrival_s) == ((7, 8), 1, 0.0)
    assert (len(second.prompt_ids), second.output_tokens, second.arrival_s) == (4, 8, 2.5)
    halved = build_workload(str(path), vocabulary_size=100, scale=0.5, num_requests=1).requests
    assert [(request.prompt_ids, request.output_tokens) for request in halved] == [((7,), 1)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no requests"),
        ("nonsense", "line 1: Invalid JSON"),
        ('{"output_tokens": 1}', "line 1: .*prompt_ids or prompt_tokens is missing"),
        ('{"prompt_ids": [], "output_tokens": 1}', "prompt_ids: .*at least 1 item"),
        ('{"prompt_tokens": 1, "output_tokens": 0}', "output_tokens: .*greater than 0"),
        ('{"prompt_tokens": 1, "output_tokens": 1, "arrival_s": -1}', "arrival_s: .*greater than or equal to 0"),
        ('{"prompt_tokens": 1, "output_tokens": 1, "user": "x"}', "user: Extra inputs"),
    ],
)
def test_wrong_trace_is_refused_with_its_line_and_reason(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=says):
        build_workload(str(path), vocabulary_size=100)
