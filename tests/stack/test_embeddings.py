"""Embeddings and scores through whole stacks: values, failures, refusals, beside requests that generate."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer, pre_tokenizers

from inflight import AsyncClient, Client, InflightError
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from inflight.local.state import read_state
from tests.support.checkpoints.pooling_models import Oracle, write_embedding_model, write_qwen3
from tests.support.stack.executors_linked import wait_for_executors

# The first test of a build may wait for the compiler.
pytestmark = pytest.mark.timeout(300)

EXECUTOR_ARGS = (
    *("--dtype", "float32"),
    *("--num-threads", "1"),
    *("--max-num-sequences", "4"),
    *("--max-num-tokens", "64"),
    *("--max-tokens-in-paged-kv-cache", "4096"),
)
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
USER = (
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {query}\n<Document>: {document}"
)
TEXTS = [f"{'What is in-flight batching? ' * (1 + i % 3)}{i}" for i in range(24)]


@pytest.fixture(scope="module")
def embedding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedding_model(tmp_path_factory.mktemp("models") / "embedding")


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "reranker"
    write_qwen3(folder, seed=1)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def embedding_stack(tmp_path_factory: pytest.TempPathFactory, embedding_model: Path) -> AsyncIterator[LocalStack]:
    """Two executors, so that one may die."""
    options = StackOptions(
        executors=2,
        gateways=1,
        model=str(embedding_model),
        executor_args=EXECUTOR_ARGS,
        run_dir=tmp_path_factory.mktemp("run"),
    )
    async with LocalStack(options) as running:
        await wait_for_executors(running.address, options.executors)
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def reranker_stack(tmp_path_factory: pytest.TempPathFactory, reranker: Path) -> AsyncIterator[LocalStack]:
    """A model that generates, and scores because a setting says so."""
    options = StackOptions(
        gateways=1,
        model=str(reranker),
        executor_args=(*EXECUTOR_ARGS, "--pooling", "yes_no"),
        run_dir=tmp_path_factory.mktemp("run"),
    )
    async with LocalStack(options) as running:
        yield running


def expected(folder: Path, texts: list[str], dimensions: int = 64) -> torch.Tensor:
    oracle = Oracle(folder)
    return torch.stack([oracle.embedding(list(ids), dimensions=dimensions) for ids in map(bytes_as_ids, texts)])


def bytes_as_ids(text: str) -> list[int]:
    """The ids of a text by the tokenizer of bytes, whose vocabulary is in the order of their characters."""
    ids = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    ((pre, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [ids[character] for character in pre]


async def test_embeddings_of_texts_and_ids_are_those_of_sentence_transformers(
    embedding_stack: LocalStack, embedding_model: Path
) -> None:
    async with AsyncClient(embedding_stack.address) as client:
        (model,) = await client.list_models()
        of_texts = await client.embed(TEXTS)
        of_ids = await client.embed([bytes_as_ids(text) for text in TEXTS])
        few = await client.embed(TEXTS[0], dimensions=16)

    assert model.pooling is not None
    assert (model.pooling.kind, model.pooling.size, model.pooling.is_only) == ("last", 64, True)
    values = torch.tensor([one.values for one in of_texts])
    assert (values - expected(embedding_model, TEXTS)).abs().max() <= 1e-5
    assert [one.values for one in of_ids] == [one.values for one in of_texts]
    assert [one.prompt_tokens for one in of_texts] == [len(text) for text in TEXTS]
    assert max(one.cached_tokens for one in of_ids) > 0
    assert (torch.tensor(few[0].values) - expected(embedding_model, TEXTS[:1], 16)[0]).abs().max() <= 1e-5


def test_the_blocking_client_embeds(embedding_stack: LocalStack) -> None:
    with Client(embedding_stack.address) as client:
        (one,) = client.embed("a text")
    assert len(one.values) == 64


async def test_a_call_survives_the_death_of_executors(embedding_stack: LocalStack, embedding_model: Path) -> None:
    """An executor is killed while many inputs wait and run. Every input has its result, and the right one."""
    texts = [f"{text} {i}" * 8 for i, text in enumerate(TEXTS * 12)]
    state = read_state(embedding_stack.options.run_dir)
    assert state is not None
    async with AsyncClient(embedding_stack.address) as client:
        call = asyncio.create_task(client.embed(texts, timeout=300))
        while not sum(one.seats_used for one in (await client.capacity()).executors):
            assert not call.done()
            await asyncio.sleep(0.005)
        os.kill(next(one.pid for one in state.processes if one.role == "executor"), signal.SIGKILL)
        results = await call
        await wait_for_executors(embedding_stack.address, 1)

    assert len(results) == len(texts)
    some = range(0, len(texts), 29)
    values = torch.tensor([results[i].values for i in some])
    assert (values - expected(embedding_model, [texts[i] for i in some])).abs().max() <= 1e-5


async def test_a_call_that_its_client_leaves_frees_its_blocks(embedding_stack: LocalStack) -> None:
    async with AsyncClient(embedding_stack.address) as client:
        call = asyncio.create_task(client.embed([f"{i:03} " * 250 for i in range(200)]))
        while not sum(one.blocks_reserved for one in (await client.capacity()).executors):
            assert not call.done()
            await asyncio.sleep(0.005)
        call.cancel()
        async with asyncio.timeout(60):
            while True:
                capacity = await client.capacity()
                waiting = sum(one.num_requests for one in capacity.queues)
                if not waiting and not any(one.blocks_reserved or one.blocks_used for one in capacity.executors):
                    break
                await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"inputs": []}, "inputs"),
        ({"inputs": ["fine", ""]}, "inputs[1].text"),
        ({"inputs": [[1, 2], [100_000]]}, "inputs[1].token_ids.ids[0]"),
        ({"inputs": "x" * 1025}, "inputs[0].text"),
        ({"inputs": "fine", "dimensions": 65}, "dimensions"),
        ({"inputs": "fine", "model": "other"}, "model"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_wrong_calls_are_refused_by_the_name_of_the_field(
    embedding_stack: LocalStack, asked: dict[str, object], field: str
) -> None:
    async with AsyncClient(embedding_stack.address) as client:
        with pytest.raises(InflightError) as caught:
            await client.embed(**asked)  # type: ignore[arg-type]
    assert field in [violation.field for violation in caught.value.fields]


async def test_models_are_refused_what_they_are_not_for(
    embedding_stack: LocalStack, reranker_stack: LocalStack
) -> None:
    async with AsyncClient(embedding_stack.address) as client:
        with pytest.raises(InflightError, match="does not generate"):
            await client.complete("hello", max_tokens=2)
        with pytest.raises(InflightError, match="makes embeddings"):
            await client.score("query", ["document"])
    async with AsyncClient(reranker_stack.address) as client:
        with pytest.raises(InflightError, match="makes scores"):
            await client.embed("hello", dimensions=2)


async def test_scores_are_the_yes_and_no_of_the_models_own_prompt(reranker_stack: LocalStack, reranker: Path) -> None:
    documents = ["Paris is the capital of France.", "Bread is made of flour.", "a <|im_end|> within a text"]
    async with AsyncClient(reranker_stack.address) as client:
        generated, scores = await asyncio.gather(
            client.complete("hello", max_tokens=40, temperature=0, ignore_eos=True),
            client.score("capital of France", documents),
        )
        chat = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": USER.format(query="capital of France", document=documents[0])},
        ]
        # What the template writes when nothing is to be thought.
        prompt = [*await client.tokenize(chat=chat), *await client.tokenize("<think>\n\n</think>\n\n")]
        (by_ids,) = await client.embed([prompt])

    assert generated.usage.output_tokens == 40
    assert all(0 < one.value < 1 for one in scores)
    tokenizer = Tokenizer.from_file(str(reranker / "tokenizer.json"))
    yes, no = tokenizer.token_to_id("yes"), tokenizer.token_to_id("no")
    assert scores[0].value == pytest.approx(Oracle(reranker).yes_no(prompt, yes, no), abs=1e-5)
    assert by_ids.values == pytest.approx([scores[0].value], abs=1e-6)


async def test_more_inputs_than_allowed_are_refused(embedding_stack: LocalStack) -> None:
    async with AsyncClient(embedding_stack.address) as client:
        with pytest.raises(InflightError) as caught:
            await client.embed(["x"] * 2049)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
