"""The shapes of traffic: the same everywhere, within their published ranges, smaller when scaled."""

from __future__ import annotations

import pytest

from bench.workloads.generate import build_workload
from bench.workloads.plan import Workload
from bench.workloads.shapes import SHAPES

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
