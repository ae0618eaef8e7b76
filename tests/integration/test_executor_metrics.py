"""Metrics on an executor's HTTP port, compared with known work and with docs/metrics.md."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from starlette.applications import Starlette

from inflight.common.http.metrics_page import metrics_route
from inflight.common.http.port import HttpPort
from inflight.executor.scheduler.limits import KvWindow
from inflight.executor.serving.metrics import executor_metrics
from inflight.executor.serving.report import Rates, report_of
from inflight.v1 import executor_pb2, executor_pb2_grpc, types_pb2
from tests.support.stack.cluster import ExecutorShape, RunningExecutor, start_executor
from tests.support.stack.http_pages import page

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
MODEL = "m"
PROMPT = list(range(5)) * 2
OUTPUT_TOKENS = 6
NUM_REQUESTS = 3

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples_of(families: list[Metric]) -> Samples:
    return {(sample.name, frozenset(sample.labels.items())): sample.value for one in families for sample in one.samples}


def value(samples: Samples, name: str, **labels: str) -> float:
    """The sample of the model's."""
    model = "model_name" if name.startswith("vllm:") else "model"
    return samples[name, frozenset({**labels, model: MODEL}.items())]


@asynccontextmanager
async def measured(shape: ExecutorShape | None = None) -> AsyncIterator[tuple[RunningExecutor, str]]:
    """An executor, and the address of its metrics."""
    executor = await start_executor("e0", MODEL, shape or ExecutorShape())
    port = HttpPort(Starlette(routes=[metrics_route(executor_metrics(executor.service))]))
    try:
        yield executor, await port.start("127.0.0.1:0")
    finally:
        await port.stop()
        await executor.stop()


async def run_requests(executor: RunningExecutor, prompts: Sequence[list[int]] = (PROMPT,) * NUM_REQUESTS) -> list[int]:
    """Runs requests one after the other, that begin alike. Returns the cached tokens that each was told of."""
    cached_tokens: list[int] = []
    async with grpc.aio.insecure_channel(executor.address) as channel:
        stream = executor_pb2_grpc.ExecutorServiceStub(channel).Serve()
        hello = executor_pb2.Hello(router_id="router", protocol_version=2, generation=1, max_unacked_steps=1000)
        await stream.write(executor_pb2.ServeRequest(hello=hello))
        for i, prompt in enumerate(prompts):
            submit = executor_pb2.Submit(
                request_id=f"r{i}",
                attempt=1,
                prompt_ids=prompt,
                reserved_blocks=4,
                num_choices=1,
                sampling=types_pb2.SamplingParams(temperature=0, top_p=1),
                stopping=types_pb2.StoppingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True),
            )
            await stream.write(executor_pb2.ServeRequest(submits=[submit]))
            async for response in stream:
                cached_tokens += [started.cached_tokens for started in response.step.started]
                if response.step.finished:
                    break
        stream.cancel()
    return cached_tokens


async def test_what_is_counted_is_what_was_done() -> None:
    async with measured() as (executor, address):
        await run_requests(executor)
        content_type, text = await page(address)
        assert content_type.startswith("text/plain; version=0.0.4")
        samples = samples_of(list(parse_text(text)))

    num_steps = executor.engine.num_steps
    # Of 10 tokens 8 fill blocks, which the second request and the third find.
    num_found = (NUM_REQUESTS - 1) * 8
    num_computed = NUM_REQUESTS * (len(PROMPT) + OUTPUT_TOKENS - 1) - num_found
    assert value(samples, "inflight_computed_tokens_total") == num_computed
    assert value(samples, "inflight_prefix_query_tokens_total") == NUM_REQUESTS * len(PROMPT)
    assert value(samples, "inflight_prefix_hit_tokens_total") == num_found
    assert value(samples, "vllm:prompt_tokens_total") == NUM_REQUESTS * len(PROMPT)
    assert value(samples, "vllm:generation_tokens_total") == NUM_REQUESTS * OUTPUT_TOKENS
    assert value(samples, "inflight_batch_tokens_sum", phase="prefill") == NUM_REQUESTS * len(PROMPT) - num_found
    assert value(samples, "inflight_batch_tokens_sum", phase="decode") == NUM_REQUESTS * (OUTPUT_TOKENS - 1)
    assert value(samples, "inflight_step_seconds_count") == num_steps
    assert value(samples, "inflight_steps_total", constraint="no_work") == num_steps
    assert value(samples, "inflight_step_part_seconds_total", part="plan") > 0
    assert (value(samples, "inflight_seats"), value(samples, "inflight_seats_used")) == (4, 0)
    assert (value(samples, "inflight_blocks"), value(samples, "inflight_blocks_used")) == (32, 0)
    assert value(samples, "inflight_blocks_cached") == value(samples, "inflight_blocks_evictable") > 0
    assert value(samples, "inflight_draining") == 0
    assert value(samples, "inflight_executor_invalid_logits_total") == 0
    assert value(samples, "vllm:spec_decode_num_draft_tokens_total") == 0
    assert value(samples, "vllm:cache_config_info", block_size="4", num_gpu_blocks="32") == 1


async def test_prefixes_in_host_memory_are_counted_as_cached_and_for_themselves() -> None:
    # Given a pool with room for one request, and host memory for all.
    prompts = [[number] * 10 for number in (1, 2, 1, 2)]
    async with measured(ExecutorShape(num_blocks=4, num_host_blocks=8)) as (executor, address):
        assert await run_requests(executor, prompts) == [0, 0, 8, 8]
        _, text = await page(address)
        samples = samples_of(list(parse_text(text)))
        report = report_of(1, executor.service.status, (), Rates(0.0, 0.0)) if executor.service.status else None

    def count(name: str) -> float:
        return value(samples, f"inflight_host_prefix_{name}")

    # A prompt of 10 tokens and its output fill three blocks; the second request of each finds two of them again.
    assert value(samples, "inflight_prefix_hit_tokens_total") == count("hit_tokens_total") == 16
    assert count("blocks_restored_total") == 4
    assert count("blocks") == count("blocks_stored_total") >= 4
    assert count("blocks_dropped_total") == 0
    assert value(samples, "inflight_host_blocks_used") == 0
    assert report is not None
    assert (report.host_prefixes.restored_blocks, report.host_prefixes.hit_tokens) == (4, 16)


async def test_blocks_are_counted_by_kv_group() -> None:
    names = ("blocks", "blocks_used", "blocks_cached", "blocks_evictable")

    async def counts(shape: ExecutorShape) -> dict[str, list[float]]:
        async with measured(shape) as (executor, address):
            await run_requests(executor)
            samples = samples_of(list(parse_text((await page(address))[1])))
        groups = {dict(labels)["group"] for name, labels in samples if name == "inflight_kv_group_blocks"}
        return {group: [value(samples, f"inflight_kv_group_{name}", group=group) for name in names] for group in groups}

    # A request computes 15 positions, which fill three blocks; the others find what it published.
    assert await counts(ExecutorShape()) == {"full": [32, 0, 3, 3]}
    # Nothing is evicted, so blocks stay findable after they have left the window.
    window = KvWindow(num_tokens=5, num_blocks=24, max_sequences=4)
    assert await counts(ExecutorShape(kv_window=window)) == {"full": [32, 0, 3, 3], "window": [24, 0, 3, 3]}


async def test_who_runs_waits_or_is_left_behind_shows_at_once() -> None:
    async with measured(ExecutorShape(max_num_sequences=1, num_standby_sequences=1)) as (executor, address):
        executor.brake.hold()
        executor.brake.permit(1)
        async with grpc.aio.insecure_channel(executor.address) as channel:
            stream = executor_pb2_grpc.ExecutorServiceStub(channel).Serve()
            hello = executor_pb2.Hello(router_id="router", protocol_version=2, generation=1, max_unacked_steps=1000)
            submits = [
                executor_pb2.Submit(
                    request_id=name,
                    attempt=1,
                    prompt_ids=[1, 2],
                    reserved_blocks=6,
                    sampling=types_pb2.SamplingParams(temperature=0, top_p=1),
                    stopping=types_pb2.StoppingParams(max_tokens=20, ignore_eos=True),
                )
                for name in ("seated", "waiting")
            ]
            await stream.write(executor_pb2.ServeRequest(hello=hello))
            await stream.write(executor_pb2.ServeRequest(submits=submits))
            async for response in stream:
                if response.step.token_ids:
                    break
            samples = samples_of(list(parse_text((await page(address))[1])))
            stream.cancel()
        assert (value(samples, "inflight_seats_used"), value(samples, "inflight_sequences_waiting")) == (1, 1)
        assert (value(samples, "vllm:num_requests_running"), value(samples, "vllm:num_requests_waiting")) == (1, 1)
        assert value(samples, "inflight_blocks_reserved") == 12
        assert value(samples, "vllm:kv_cache_usage_perc") == pytest.approx(value(samples, "inflight_blocks_used") / 32)
        while not executor.service.num_orphans:
            await asyncio.sleep(0.005)
        assert value(samples_of(list(parse_text((await page(address))[1]))), "inflight_orphans") == 2


async def test_names_and_labels_are_those_of_the_page() -> None:
    async with measured() as (executor, address):
        await run_requests(executor)
        accept = "application/openmetrics-text;version=1.0.0"
        content_type, text = await page(address, headers={"accept": accept})
    assert content_type.startswith("application/openmetrics-text")
    shown: dict[str, set[str]] = {}
    for family in parse_openmetrics(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        shown[name] = {label for sample in family.samples for label in sample.labels} - {"le"}
    # It serves no adapters and has no recurrent layers; tests/integration/test_adapters.py and
    # tests/stack/test_hybrid_model.py have models that do.
    elsewhere = ("inflight_adapter_", "inflight_state_")
    assert shown == {name: labels for name, labels in documented().items() if not name.startswith(elsewhere)}


def documented() -> dict[str, set[str]]:
    """The executor's metrics on the page, with their labels."""
    section = PAGE.read_text(encoding="utf-8").partition("## Executor\n")[2].partition("\n## ")[0]
    found: dict[str, set[str]] = {}
    for row in re.findall(r"^\| (`inflight_.*)$", section, re.MULTILINE):
        names, _, labels, _ = row.split(" | ", 3)
        for name in re.findall(r"`([^`]+)`", names):
            found[name] = set(re.findall(r"`([^`]+)`", labels))
    prose = section[section.index("vLLM's names") :]
    for name in re.findall(r"`(vllm:[^`]+)`", prose):
        found[name] = {"model_name"}
    found["vllm:cache_config_info"] |= {"block_size", "num_gpu_blocks"}
    found["vllm:spec_decode_num_accepted_tokens_per_pos_total"] |= {"position"}
    return found
