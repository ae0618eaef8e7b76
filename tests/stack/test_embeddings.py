"""Embeddings and scores through whole stacks: values, failures, refusals, beside requests that generate."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import grpc
import httpx2
import openai
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
    assert yes is not None
    assert no is not None
    assert scores[0].value == pytest.approx(Oracle(reranker).yes_no(prompt, yes, no), abs=1e-5)
    assert by_ids.values == pytest.approx([scores[0].value], abs=1e-6)


async def test_more_inputs_than_allowed_are_refused(embedding_stack: LocalStack) -> None:
    async with AsyncClient(embedding_stack.address) as client:
        with pytest.raises(InflightError) as caught:
            await client.embed(["x"] * 2049)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


# Through the gateway, by clients of others and over HTTP.


async def test_a_batch_of_embeddings_has_those_of_its_lines(embedding_stack: LocalStack, embedding_model: Path) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"http://{embedding_stack.gateway_addresses[0]}/v1", api_key="none", max_retries=0
    ) as client:
        model = (await client.models.list()).data[0].id
        bodies = [*({"model": model, "input": text} for text in TEXTS), {"model": model, "input": "x" * 1025}]
        url: Literal["/v1/embeddings"] = "/v1/embeddings"
        lines = [
            json.dumps({"custom_id": str(i), "method": "POST", "url": url, "body": body})
            for i, body in enumerate(bodies)
        ]
        file = await client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
        async with asyncio.timeout(60):
            while batch.status != "completed":
                await asyncio.sleep(0.1)
                batch = await client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        output = (await client.files.content(batch.output_file_id)).text
        errors = (await client.files.content(batch.error_file_id)).text

    found = {one["custom_id"]: one["response"]["body"] for one in map(json.loads, output.splitlines())}
    values = torch.tensor([found[str(i)]["data"][0]["embedding"] for i in range(len(TEXTS))])
    assert (values - expected(embedding_model, TEXTS)).abs().max() <= 1e-5
    (refused,) = map(json.loads, errors.splitlines())
    assert (refused["custom_id"], refused["response"]["status_code"]) == (str(len(TEXTS)), 400)


async def test_openai_python_gets_embeddings_unmodified(embedding_stack: LocalStack, embedding_model: Path) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"http://{embedding_stack.gateway_addresses[0]}/v1", api_key="none", max_retries=0
    ) as client:
        model = (await client.models.list()).data[0].id
        # It asks for base64 by itself.
        packed = await client.embeddings.create(model=model, input=TEXTS)
        plain = await client.embeddings.create(model=model, input=TEXTS, encoding_format="float")
        of_ids = await client.embeddings.create(model=model, input=[bytes_as_ids(text) for text in TEXTS[:2]])
        few = await client.embeddings.create(model=model, input=TEXTS[0], dimensions=16)
        with pytest.raises(openai.BadRequestError) as too_long:
            await client.embeddings.create(model=model, input=["fine", "x" * 1025])
        with pytest.raises(openai.BadRequestError) as too_many:
            await client.embeddings.create(model=model, input="fine", dimensions=65)
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="other", input="fine")
        with pytest.raises(openai.BadRequestError, match="does not generate"):
            await client.completions.create(model=model, prompt="hello")

    values = torch.tensor([one.embedding for one in packed.data])
    assert (values - expected(embedding_model, TEXTS)).abs().max() <= 1e-5
    assert [one.embedding for one in plain.data] == [one.embedding for one in packed.data]
    assert [one.embedding for one in of_ids.data] == [one.embedding for one in packed.data[:2]]
    assert [one.index for one in packed.data] == list(range(len(TEXTS)))
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == sum(map(len, TEXTS))
    assert len(few.data[0].embedding) == 16
    assert (too_long.value.param, too_long.value.code) == ("input[1]", "context_length_exceeded")
    assert too_many.value.param == "dimensions"


async def test_rerank_and_score_in_the_forms_of_others(reranker_stack: LocalStack) -> None:
    documents = ["Paris is in France.", "Bread is made of flour.", "A bus has seats."]
    url = f"http://{reranker_stack.gateway_addresses[0]}"
    query = "capital of France"
    async with AsyncClient(reranker_stack.address) as client, httpx2.AsyncClient(base_url=url, timeout=60) as http:
        (model,) = await client.list_models()
        scores = [one.value for one in await client.score(query, documents)]
        asked = {"model": model.name, "query": query, "documents": documents}
        answers = {}
        for path, body in (
            ("/v1/rerank", asked | {"top_n": 2, "return_documents": True}),
            ("/v2/rerank", asked),
            ("/rerank", asked | {"documents": [{"text": text} for text in documents]}),
            ("/v1/score", {"model": model.name, "text_1": query, "text_2": documents}),
            ("/score", {"model": model.name, "text_1": [query, query], "text_2": documents[:2]}),
        ):
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            answers[path] = answer.json()
        wrong = await http.post("/v1/embeddings", json={"model": model.name, "input": "text"})
        too_long = await http.post("/v1/rerank", json=asked | {"documents": ["fine", "x" * 1025]})

    assert wrong.status_code == too_long.status_code == 400
    assert "makes scores" in wrong.json()["error"]["message"]
    assert too_long.json()["error"]["param"] == "documents[1]"
    order = sorted(range(3), key=lambda index: -scores[index])
    assert [one["index"] for one in answers["/v1/rerank"]["results"]] == order[:2]
    assert [one["document"]["text"] for one in answers["/v1/rerank"]["results"]] == [documents[i] for i in order[:2]]
    for path in ("/v2/rerank", "/rerank"):
        assert [one["index"] for one in answers[path]["results"]] == order
        assert "document" not in answers[path]["results"][0]
    values = [one["relevance_score"] for one in answers["/v2/rerank"]["results"]]
    assert values == pytest.approx([scores[index] for index in order], abs=1e-6)
    assert [one["score"] for one in answers["/v1/score"]["data"]] == pytest.approx(scores, abs=1e-6)
    assert [one["score"] for one in answers["/score"]["data"]] == pytest.approx(scores[:2], abs=1e-6)
