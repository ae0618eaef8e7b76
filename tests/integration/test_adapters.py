"""Adapters of an executor as a router uses them: a tiny model behind the real service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from transformers import LlamaConfig

from inflight.common.settings import SettingError
from inflight.executor.loader import load_executor
from inflight.executor.main import Parts
from inflight.executor.serving.metrics import executor_metrics
from inflight.executor.settings import ExecutorSettings
from inflight.v1 import executor_pb2, types_pb2
from tests.support.checkpoints.adapter_files import save_adapter
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.device.torch_threads import torch_threads
from tests.support.stack.real_executor import run_real_executor
from tests.support.stack.router_stream import RouterStream, make_submit, router_stream

LENGTH = 8
PROMPT = [3, 7, 1, 20, 55, 90, 13, 4, 4, 61, 17, 33, 8, 70, 29, 41, 2, 5] * 3
NUM_SLOTS = 2


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(LlamaConfig(**sizes()), tmp_path_factory.mktemp("model") / "tiny")


@asynccontextmanager
async def serving(base: Path, adapters: Path | None) -> AsyncIterator[tuple[Parts, RouterStream]]:
    settings = ExecutorSettings(
        model=str(base),
        listen="127.0.0.1:0",
        device="cpu",
        dtype="float32",
        num_threads=2,
        max_tokens_in_paged_kv_cache=2048,
        max_num_sequences=8,
        adapter_folder=adapters,
        max_adapters=NUM_SLOTS,
        max_adapter_rank=16,
    )
    async with (
        run_real_executor(settings) as (parts, address),
        router_stream(address, generation=parts.serving.service.description.generation) as router,
    ):
        yield parts, router


def hashes(router: RouterStream) -> dict[str, str]:
    return {adapter.name: adapter.hash for adapter in router.reports[-1].adapters}


def submit_with(request_id: str, adapter_hash: str = "", prompt: list[int] = PROMPT) -> executor_pb2.Submit:
    submit = make_submit(request_id, prompt, LENGTH)
    submit.reserved_blocks = -(-(len(prompt) + LENGTH) // 16)
    submit.adapter_hash = adapter_hash
    return submit


async def outputs(router: RouterStream, *submits: executor_pb2.Submit) -> list[list[int]]:
    """The output of each, all submitted at once."""
    router.send(submits=submits)
    ids = [submit.request_id for submit in submits]
    await router.until(lambda: all(router.of(one) and router.of(one)[0].end for one in ids))
    ends = [router.of(one)[0].end for one in ids]
    assert all(end is not None and not end.error for end in ends), ends
    return [router.of(one)[0].token_ids for one in ids]


async def test_adapters_and_base_in_one_batch_answer_as_alone(base: Path, tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "b", "c")):
        save_adapter(tmp_path / name, seed, rank=4 + seed)
    async with serving(base, tmp_path) as (parts, router):
        assert parts.serving.service.description.num_adapter_slots == NUM_SLOTS
        known = {"": "", **hashes(router)}
        assert list(known) == ["", "a", "b", "c"]
        alone = {name: (await outputs(router, submit_with(f"1{name}", known[name])))[0] for name in known}
        assert len({tuple(ids) for ids in alone.values()}) == 4
        for third in ("b", "c"):
            names = ["a", "", third, "a", third]
            batch = [submit_with(f"{third}{i}", known[name]) for i, name in enumerate(names)]
            assert await outputs(router, *batch) == [alone[name] for name in names]
        # The reports say which are in the slots
        await router.until(lambda: {one.name for one in router.reports[-1].adapters if one.resident} == {"a", "c"})
        samples = {
            (sample.name, sample.labels.get("adapter")): sample.value
            for metric in executor_metrics(parts.serving.service).collect()
            for sample in metric.samples
        }
        assert (samples["inflight_adapter_slots", None], samples["inflight_adapter_slots_used", None]) == (NUM_SLOTS, 2)
        assert [samples["inflight_adapter_loads_total", name] for name in ("a", "b", "c")] == [2, 1, 2]
        assert samples["inflight_adapter_sequences", "a"] == 0
        assert samples["vllm:lora_requests_info", None] > 0


async def test_replaced_files_serve_no_old_kv(base: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path / "a", seed=1)
    async with serving(base, tmp_path) as (parts, router):
        old_hash = hashes(router)["a"]
        (old,) = await outputs(router, submit_with("old", old_hash))
        # The same prompt again takes the blocks of the adapter, and of no other
        assert await outputs(router, submit_with("again", old_hash)) == [old]
        assert parts.serving.service.status is not None
        num_hits = parts.serving.service.status.kv.hit_tokens
        assert num_hits > 0
        (plain,) = await outputs(router, submit_with("plain"))
        save_adapter(tmp_path / "a", seed=2)
        assert parts.serving.service.adapters is not None
        parts.serving.service.adapters.look()
        await router.until(lambda: hashes(router)["a"] != old_hash)
        (new,) = await outputs(router, submit_with("new", hashes(router)["a"]))
        assert parts.serving.service.status.kv.hit_tokens == num_hits
        assert len({tuple(old), tuple(plain), tuple(new)}) == 3
    async with serving(base, tmp_path) as (_, router):
        assert await outputs(router, submit_with("fresh", hashes(router)["a"])) == [new]


async def test_unknown_adapter_is_rejected_and_one_that_is_gone_is_handed_back(base: Path, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "a")
    async with serving(base, tmp_path) as (_, router):
        router.send(submits=[submit_with("unknown", "0" * 64), submit_with("wrong", "x")])
        await router.until(lambda: len(router.rejected) == 2)
        unknown, wrong = router.rejected
        assert unknown.reason == executor_pb2.REJECT_REASON_NO_CAPACITY
        assert unknown.detail == f"adapter_hash: this executor has no adapter {'0' * 64}"
        assert wrong.reason == executor_pb2.REJECT_REASON_INVALID

        (folder / "adapter_model.safetensors").unlink()
        router.send(submits=[submit_with("gone", hashes(router)["a"])])
        await router.until(lambda: router.of("gone") and router.of("gone")[0].end)
        end = router.of("gone")[0].end
        assert end is not None
        assert (end.reason, end.error) == (types_pb2.FINISH_REASON_PREEMPTED, "")
        # The report says so, so that the ledger places no other request with it here
        await router.until(lambda: not router.reports[-1].adapters)
        assert len((await outputs(router, submit_with("base")))[0]) == LENGTH


async def test_executor_without_adapters_rejects_them(base: Path) -> None:
    async with serving(base, None) as (parts, router):
        assert parts.serving.service.description.num_adapter_slots == 0
        router.send(submits=[submit_with("a", "0" * 64)])
        await router.until(lambda: router.rejected)
        assert router.rejected[0].detail == "adapter_hash: this executor serves no adapters"


def test_forward_pass_of_transformers_refuses_an_adapter_folder(base: Path, tmp_path: Path) -> None:
    settings = ExecutorSettings(model=str(base), device="cpu", forward="transformers", adapter_folder=tmp_path)
    with torch_threads(2), pytest.raises(SettingError, match="needs a native forward pass"):
        load_executor(settings)
