"""LoRA adapters through the whole stack, with executors of two ranks: three of them and the base at once, the tokens of
one rank, and an executor that dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from inflight import AsyncClient, Completion
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from tests.stack.test_ranks_in_process import GREEDY, NUM_TOKENS, adapted, loaded, request, tokens_of
from tests.support.checkpoints.adapter_files import save_adapter
from tests.support.device.torch_threads import torch_threads
from tests.support.stack.executor_death import finished_after_death
from tests.support.stack.executors_linked import wait_for_executors
from tests.support.stack.gateways import run_gateway

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
    *("--tensor-parallel-size", "2"),
)
PROMPT = "Once upon a time"
ASKED: dict[str, Any] = {"temperature": 0.9, "seed": 5, "ignore_eos": True, "want_token_ids": True}


def save_adapters(folder: Path) -> Path:
    for seed, name in enumerate(NAMES):
        save_adapter(folder / name, seed=seed, rank=4 + 4 * (seed % 2))
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def adapter_stack(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> AsyncIterator[LocalStack]:
    """Two executors of the tiny model that serve three adapters in two slots."""
    folder = save_adapters(tmp_path_factory.mktemp("adapters"))
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


async def test_adapters_and_the_base_at_once_say_what_each_says_alone(adapter_stack: LocalStack) -> None:
    async with AsyncClient(adapter_stack.address) as client, run_gateway(adapter_stack.address) as gateway:
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


def tokens_of_one_rank(model: Path, adapters: Path) -> dict[str, list[int]]:
    """The greedy outputs of one rank in this process for one prompt, by adapter; without for an empty name."""
    with torch_threads(1), loaded(str(model), 1, dtype="float32", adapter_folder=adapters, max_adapters=3) as one:
        assert one.adapters is not None
        requests = {name: adapted(one.adapters, 3, name) for name in NAMES} | {"": request(3, GREEDY)}
        return {name: tokens_of(one, [sequence])[0] for name, sequence in requests.items()}


async def test_two_ranks_answer_through_the_gateway_with_the_tokens_of_one(
    adapter_stack: LocalStack, tiny_model: Path, tmp_path: Path
) -> None:
    expected = await asyncio.to_thread(tokens_of_one_rank, tiny_model, save_adapters(tmp_path))
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)
    prompt, asked = request(3, GREEDY).token_ids, {"max_tokens": NUM_TOKENS, "temperature": 0.0}
    async with (
        AsyncClient(adapter_stack.address) as client,
        run_gateway(adapter_stack.address) as gateway,
        gateway.openai() as openai,
    ):
        for name, tokens in expected.items():
            model = f"{MODEL}:{name}" if name else MODEL
            named: dict[str, Any] = {"model": model, **asked}
            completion = await client.complete(token_ids=prompt, ignore_eos=True, want_token_ids=True, **named)
            assert [*completion.token_ids] == tokens
            answer = await openai.completions.create(prompt=prompt, extra_body={"ignore_eos": True}, **named)
            assert answer.choices[0].text == completion.text


async def test_request_with_an_adapter_continues_with_it_when_its_executor_dies(adapter_stack: LocalStack) -> None:
    async with AsyncClient(adapter_stack.address) as client:
        whole = await complete(client, "two", max_tokens=600)
        stream = client.generate(PROMPT, adapter_id="two", max_tokens=600, **ASKED)
        continued = await finished_after_death(adapter_stack, stream)
    assert continued.token_ids == whole.token_ids
