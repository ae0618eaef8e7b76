"""LoRA adapters through the whole stack: three of them and the base at once, and an executor that dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from inflight import AsyncClient, Completion
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from inflight.local.state import read_state
from tests.adapter_files import save_adapter
from tests.executors_linked import wait_for_executors
from tests.gateways import run_gateway

MODEL = "tiny"
NAMES = ("one", "three", "two")
# As many executors as there are, so that one may die; fewer slots than adapters, so that some are evicted.
EXECUTOR_ARGS = (
    *("--dtype", "float32"),
    *("--num-threads", "1"),
    *("--max-num-sequences", "4"),
    *("--max-tokens-in-paged-kv-cache", "4096"),
    *("--max-adapters", "2"),
    *("--max-adapter-rank", "8"),
)
PROMPT = "Once upon a time"
ASKED: dict[str, Any] = {"temperature": 0.9, "seed": 5, "ignore_eos": True, "want_token_ids": True}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def adapted(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> AsyncIterator[LocalStack]:
    """Two executors of the tiny model that serve three adapters in two slots."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        save_adapter(folder / name, seed=seed, rank=4 + 4 * (seed % 2))
    options = StackOptions(
        executors=2,
        model=str(tiny_model),
        executor_args=(*EXECUTOR_ARGS, "--adapter-folder", str(folder)),
        run_dir=tmp_path_factory.mktemp("run"),
    )
    async with LocalStack(options) as running:
        await wait_for_executors(running.address, options.executors)
        yield running


async def complete(client: AsyncClient, adapter: str, max_tokens: int = 24) -> Completion:
    """What the model says with an adapter; without for an empty name."""
    return await client.complete(PROMPT, adapter_id=adapter, max_tokens=max_tokens, **ASKED)


async def test_adapters_and_the_base_at_once_say_what_each_says_alone(adapted: LocalStack) -> None:
    async with AsyncClient(adapted.address) as client, run_gateway(adapted.address) as gateway:
        alone = {name: await complete(client, name) for name in ("", *NAMES)}
        assert len({completion.token_ids for completion in alone.values()}) == 4

        together = await asyncio.gather(*(complete(client, name) for name in list(alone) * 3))
        assert [one.token_ids for one in together] == [one.token_ids for one in alone.values()] * 3

        async with gateway.openai() as openai:
            listed = [entry.id for entry in (await openai.models.list()).data]
            assert listed == [MODEL, *(f"{MODEL}:{name}" for name in NAMES)]
            asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0.9, "seed": 5}
            answers = await asyncio.gather(
                *(openai.completions.create(model=one, extra_body={"ignore_eos": True}, **asked) for one in listed)
            )
        assert [answer.choices[0].text for answer in answers] == [one.text for one in alone.values()]
        assert [answer.model for answer in answers] == listed


async def test_request_with_an_adapter_continues_with_it_when_its_executor_dies(adapted: LocalStack) -> None:
    async with AsyncClient(adapted.address) as client:
        whole = await complete(client, "two", max_tokens=600)
        stream = client.generate(PROMPT, adapter_id="two", max_tokens=600, **ASKED)
        deltas = aiter(stream)
        await anext(deltas)
        state = read_state(adapted.options.run_dir)
        assert state is not None
        (pid,) = (one.pid for one in state.processes if one.name == stream.transcript.executor_id)
        os.kill(pid, signal.SIGKILL)
        async for _ in deltas:
            pass
    assert stream.transcript.result().token_ids == whole.token_ids
