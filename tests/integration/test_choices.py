"""Requests with several choices: what their client reads equals single requests, exactly once, whatever happens."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from inflight import AsyncClient
from inflight.beams.search import BeamParams, BeamSearch
from inflight.events import Logprob
from inflight.router.ledger.types import Demand
from inflight.router.settings import RouterSettings
from inflight.v1 import inference_pb2, types_pb2
from tests.integration.test_requests import collect, expected_ids, ids_of, rest
from tests.support.device.fake_device import token_logprobs
from tests.support.stack.cluster import (
    Brake,
    Cluster,
    ExecutorShape,
    RunningExecutor,
    RunningRouter,
    run_cluster,
    token_request,
)

PROMPT = [1, 2, 3, 4, 0, 1, 2, 3, 4]
NUM_TOKENS = 24
SEED = 2**64 - 2  # choice 2 has the seed 0
SHAPE = ExecutorShape(num_blocks=96, max_num_sequences=8)


def request_of(n: int = 4, seed: int = SEED, **fields: Any) -> inference_pb2.GenerateRequest:
    """A sampled request of `n` choices."""
    request = token_request(PROMPT, NUM_TOKENS, n=n, **fields)
    request.sampling.CopyFrom(types_pb2.SamplingParams(temperature=1.0, seed=seed))
    return request


class Client:
    """Reads one stream and checks that every token and every character comes once."""

    def __init__(self) -> None:
        self.ids: defaultdict[int, list[int]] = defaultdict(list)
        self.texts: defaultdict[int, str] = defaultdict(str)
        self.reasons: dict[int, int] = {}
        self.kinds: list[str | None] = []
        self.accepted = inference_pb2.Accepted()
        self.done = inference_pb2.Done()

    def take(self, event: inference_pb2.StreamEvent) -> None:
        kind = event.WhichOneof("event")
        self.kinds.append(kind)
        match kind:
            case "accepted":
                self.accepted = event.accepted
            case "delta":
                choice = event.delta.choice
                assert event.delta.offset == len(self.ids[choice])
                self.ids[choice].extend(event.delta.token_ids)
                self.texts[choice] += event.delta.text
            case "finished":
                self.reasons[event.finished.choice] = event.finished.reason
            case "done":
                self.done = event.done

    async def read(self, call: Any) -> None:
        self.take((await call.read()).event)

    async def read_rest(self, call: Any) -> None:
        for event in await rest(call):
            self.take(event)

    async def read_tokens(self, call: Any, num_tokens: int) -> None:
        """Reads until every choice of four has so many tokens."""
        async with asyncio.timeout(60):
            while any(len(self.ids[choice]) < num_tokens for choice in range(4)):
                await self.read(call)

    def resume(self, router: RunningRouter, n: int = 4) -> Any:
        return router.stub.Resume(
            inference_pb2.ResumeRequest(
                request_id=self.accepted.request_id,
                resume_token=self.accepted.resume_token,
                offsets=[len(self.ids[choice]) for choice in range(n)],
                text_bytes=[len(self.texts[choice]) for choice in range(n)],
            )
        )

    def check_whole(self, expected: list[list[int]]) -> None:
        assert dict(self.ids) == dict(enumerate(expected))
        assert dict(self.texts) == {k: "".join(f"t{i}" for i in ids) for k, ids in enumerate(expected)}
        assert self.reasons == dict.fromkeys(range(len(expected)), types_pb2.FINISH_REASON_LENGTH)


async def read_whole(router: RunningRouter, request: inference_pb2.GenerateRequest) -> Client:
    client = Client()
    for event in await collect(router, request):
        client.take(event)
    return client


async def singles(router: RunningRouter, n: int = 4) -> list[list[int]]:
    """The outputs of single requests with the seeds of the choices."""
    seeds = [(SEED + choice) % 2**64 for choice in range(n)]
    return [ids_of(await collect(router, request_of(1, seed=seed))) for seed in seeds]


async def begun(cluster: Cluster, num_tokens: int, **fields: Any) -> tuple[Client, Any]:
    """A request of four choices of which each has brought so many tokens, and that stands still."""
    client, brake = Client(), cluster.executors[0].brake
    brake.hold()
    call = cluster.routers[0].stub.Generate(request_of(**fields))
    stepping = asyncio.create_task(_step(brake))
    await client.read_tokens(call, num_tokens)
    stepping.cancel()
    return client, call


async def _step(brake: Brake) -> None:
    """Permits a step whenever the device waits for one."""
    while True:
        if brake.is_waited_for.is_set():
            brake.permit(1)
        await asyncio.sleep(0.005)


async def settled(*routers: RunningRouter) -> None:
    """Waits until no request waits or runs on these routers."""
    async with asyncio.timeout(60):
        while any(pool.dispatcher.streams for router in routers for pool in router.pools.by_name.values()):
            await asyncio.sleep(0.01)


async def test_each_choice_equals_a_single_request_with_its_seed(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, shape=SHAPE) as cluster:
        (router,) = cluster.routers
        client = await read_whole(router, request_of(request_id="r"))
        expected = await singles(router)
        await settled(*cluster.routers)
        cluster.executors[0].scheduler.check_when_idle()
    client.check_whole(expected)
    assert len({tuple(ids) for ids in expected}) > 1, "the seeds make a difference"
    assert client.kinds[:2] == ["accepted", "started"]
    assert [client.kinds.count(kind) for kind in ("accepted", "started", "finished", "done")] == [1, 1, 4, 1]
    assert (client.accepted.request_id, client.accepted.sampling.seed) == ("r", SEED)
    assert client.kinds[-1] == "done"
    usage = client.done.usage
    assert (usage.prompt_tokens, usage.output_tokens) == (len(PROMPT), 4 * NUM_TOKENS)


async def test_events_of_all_choices_are_numbered_in_one_sequence(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, shape=SHAPE) as cluster:
        events = await collect(cluster.routers[0], request_of())
    assert [event.seq for event in events] == list(range(len(events)))


async def test_choices_wait_for_seats_like_other_requests(redis_url: str, pool: str) -> None:
    shape = ExecutorShape(num_blocks=48, max_num_sequences=2)
    async with run_cluster(redis_url, pool, executors=2, routers=2, shape=shape) as cluster:
        answers = await asyncio.gather(*(read_whole(cluster.routers[i % 2], request_of(9)) for i in range(4)))
        expected = await singles(cluster.routers[0], 9)
        await settled(*cluster.routers)
        for executor in cluster.executors:
            executor.scheduler.check_when_idle()
    for client in answers:
        client.check_whole(expected)


async def test_choices_share_the_blocks_of_the_prompt(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, shape=SHAPE) as cluster:
        await read_whole(cluster.routers[0], request_of(8))
        computed = cluster.executors[0].scheduler.num_computed_tokens
    # The prompt once, its last part and the output for each choice.
    assert computed <= len(PROMPT) + 8 * (len(PROMPT) % 4 + 4 + NUM_TOKENS)


async def test_greedy_choices_are_equal(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, shape=SHAPE) as cluster:
        client = await read_whole(cluster.routers[0], token_request(PROMPT, 5, n=3))
    assert client.ids[0] == client.ids[1] == client.ids[2]


async def test_choices_of_a_lost_executor_go_on_at_another(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, executors=2, shape=SHAPE) as cluster:
        for executor in cluster.executors:
            executor.brake.hold()
        client = Client()
        call = cluster.routers[0].stub.Generate(request_of())
        for executor in cluster.executors:
            executor.brake.permit(3)
        while not any(client.ids.values()):
            await client.read(call)
        running = next(executor for executor in cluster.executors if executor.device.boarded)
        (other,) = (executor for executor in cluster.executors if executor is not running)
        other.brake.release()
        await running.stop()
        await client.read_rest(call)
        expected = await singles(cluster.routers[0])
    client.check_whole(expected)
    assert client.done.timing.migrations > 0


@pytest.mark.parametrize("fields", [{}, {"idempotency_key": "k"}])
@pytest.mark.parametrize("other_router", [False, True])
async def test_resumed_choices_go_on_from_their_own_offsets(
    redis_url: str, pool: str, other_router: bool, fields: dict[str, str]
) -> None:
    async with run_cluster(redis_url, pool, routers=2, shape=SHAPE) as cluster:
        client, call = await begun(cluster, 3, **fields)
        if other_router:
            await cluster.routers[0].kill()
        resumed = client.resume(cluster.routers[other_router])
        before = client.accepted
        await client.read(resumed)
        assert client.accepted == before
        cluster.executors[0].brake.release()
        await client.read_rest(resumed)
        with pytest.raises(grpc.aio.AioRpcError):
            await rest(call)
        expected = await singles(cluster.routers[1])
        await settled(cluster.routers[1])
    client.check_whole(expected)
    assert client.done.usage.output_tokens == 4 * NUM_TOKENS


@pytest.mark.parametrize("other_router", [False, True])
async def test_ended_choices_can_be_read_again(redis_url: str, pool: str, other_router: bool) -> None:
    async with run_cluster(redis_url, pool, routers=2, shape=SHAPE) as cluster:
        whole = await read_whole(cluster.routers[0], request_of())
        again = Client()
        again.accepted = whole.accepted
        again.ids[1], again.texts[1] = whole.ids[1][:7], whole.texts[1][:14]
        await again.read_rest(again.resume(cluster.routers[other_router]))
    again.check_whole([whole.ids[choice] for choice in range(4)])


async def test_repeat_with_the_same_key_gets_the_same_choices(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, routers=2, shape=SHAPE) as cluster:
        keyed = request_of(idempotency_key="k")
        keyed.sampling.ClearField("seed")
        first = await read_whole(cluster.routers[0], keyed)
        second = await read_whole(cluster.routers[1], keyed)
        other = request_of(idempotency_key="k", n=3)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(cluster.routers[1], other)
    assert first.ids == second.ids
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_client_that_leaves_ends_every_choice(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, shape=ExecutorShape(num_blocks=96, max_num_sequences=3)) as cluster:
        brake = cluster.executors[0].brake
        brake.hold()
        call = cluster.routers[0].stub.Generate(request_of())
        await call.read()
        call.cancel()
        brake.release()
        await settled(*cluster.routers)
        single = await collect(cluster.routers[0], request_of(1))
        cluster.executors[0].scheduler.check_when_idle()
    assert len(ids_of(single)) == NUM_TOKENS


def count_cancels(executor: RunningExecutor, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Awaitable[None]]:
    """Counts the cancels that an engine is told of. Returns what waits until they are so many."""
    told, cancel = asyncio.Semaphore(0), executor.engine.cancel

    def counted(*args: Any) -> None:
        cancel(*args)
        told.release()

    async def until(num_cancels: int) -> None:
        async with asyncio.timeout(60):
            for _ in range(num_cancels):
                await told.acquire()

    monkeypatch.setattr(executor.engine, "cancel", counted)
    return until


@pytest.mark.parametrize("other_router", [False, True])
@pytest.mark.parametrize("has_token", [False, True])
async def test_cancel_ends_every_choice(
    redis_url: str, pool: str, other_router: bool, has_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = ExecutorShape(num_blocks=96, max_num_sequences=4)
    async with run_cluster(redis_url, pool, routers=2, shape=shape) as cluster:
        client, call = await begun(cluster, 2, request_id="r")
        stub = cluster.routers[other_router].stub
        token = client.accepted.resume_token if has_token else ""
        named = {"request_id": "r", "resume_token": token}
        standing = await stub.GetRequest(inference_pb2.GetRequestRequest(**named))
        are_told = count_cancels(cluster.executors[0], monkeypatch)
        answer = await stub.Cancel(inference_pb2.CancelRequest(**named))
        # The answer does not wait for the executor, which could end the request meanwhile.
        await are_told(4)
        cluster.executors[0].brake.release()
        await client.read_rest(call)
        # The other router learns the end from the ledger, which is told after the client.
        await settled(*cluster.routers)
        after = await stub.GetRequest(inference_pb2.GetRequestRequest(**named))
    assert answer.state == standing.state == inference_pb2.REQUEST_STATE_PLACED
    assert bool(standing.output_tokens) != other_router
    assert client.reasons == dict.fromkeys(range(4), types_pb2.FINISH_REASON_CANCELLED)
    assert after.state == inference_pb2.REQUEST_STATE_ENDED


async def test_detached_choices_run_to_their_end(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, shape=SHAPE) as cluster:
        client, call = await begun(cluster, 2, detach=True)
        call.cancel()
        cluster.executors[0].brake.release()
        await settled(*cluster.routers)
        await client.read_rest(client.resume(cluster.routers[0]))
        expected = await singles(cluster.routers[0])
    client.check_whole(expected)


async def test_choices_that_never_fit_the_queue_are_refused_as_one(redis_url: str, pool: str) -> None:
    settings = RouterSettings(max_queue_requests=3)
    async with run_cluster(redis_url, pool, shape=SHAPE, settings=settings) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(cluster.routers[0], request_of(5))
        # As many as fit: the first may have to wait, too, because a report is late
        client = await read_whole(cluster.routers[0], request_of(3))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(client.reasons) == 3


async def test_choice_that_is_refused_ends_the_others(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, shape=SHAPE) as cluster:
        (router,) = cluster.routers
        store = router.pools.by_name[pool].dispatcher._ledger  # the ledger's answer for one choice
        await store.submit(Demand("r~2", 2, 1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(router, request_of(request_id="r"))
        await settled(*cluster.routers)
        cluster.executors[0].scheduler.check_when_idle()
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 1000}, "n"),
        ({"best_of": 1000}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 2, "prior_output": inference_pb2.PriorOutput(output_ids=[1])}, "prior_output"),
    ],
)
async def test_number_of_choices_is_bounded(redis_url: str, pool: str, fields: dict[str, Any], field: str) -> None:
    async with run_cluster(redis_url, pool, shape=SHAPE) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(cluster.routers[0], request_of(**fields))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(caught.value.details()).startswith(f"{field}: ")


@pytest.mark.parametrize("best_of", [0, 4])
async def test_prompt_is_scored_once_before_the_output_of_any_choice(redis_url: str, pool: str, best_of: int) -> None:
    output = inference_pb2.OutputOptions(token_ids=True, prompt_logprobs=True, echo=True)
    async with run_cluster(redis_url, pool, shape=SHAPE) as cluster:
        events = await collect(cluster.routers[0], request_of(3, best_of=best_of, output=output))
    kinds = [event.WhichOneof("event") for event in events]
    prompts = [event.prompt for event in events if event.HasField("prompt")]
    assert [token_id for prompt in prompts for token_id in prompt.token_ids] == PROMPT
    assert kinds.index("delta") > max(at for at, kind in enumerate(kinds) if kind == "prompt")
    texts: defaultdict[int, str] = defaultdict(str)
    for event in events:
        texts[event.delta.choice] += event.delta.text
    echoed = "".join(f"t{token}" for token in PROMPT)
    assert [texts[choice].startswith(echoed) for choice in range(3)] == [True] * 3


# --- the best of several


def mean_logprob(ids: list[int]) -> float:
    return -sum(ids) / 8 / len(ids)  # of the fake device


@pytest.mark.parametrize("wants_logprobs", [False, True])
async def test_best_choices_come_by_rank_when_all_have_ended(redis_url: str, pool: str, wants_logprobs: bool) -> None:
    output = inference_pb2.OutputOptions(token_ids=True, logprobs=wants_logprobs)
    async with run_cluster(redis_url, pool, shape=SHAPE) as cluster:
        events = await collect(cluster.routers[0], request_of(2, best_of=8, output=output))
        expected = sorted(await singles(cluster.routers[0], 8), key=mean_logprob, reverse=True)
    client = Client()
    for event in events:
        client.take(event)
    client.check_whole(expected[:2])
    assert client.done.usage.output_tokens == 8 * NUM_TOKENS
    assert all(bool(event.delta.logprobs) == wants_logprobs for event in events if event.HasField("delta"))


@pytest.mark.parametrize("other_router", [False, True])
async def test_best_choices_can_be_resumed(redis_url: str, pool: str, other_router: bool) -> None:
    async with run_cluster(redis_url, pool, routers=2, shape=SHAPE) as cluster:
        whole = await read_whole(cluster.routers[0], request_of(2, best_of=8))
        again = Client()
        again.accepted = whole.accepted
        again.ids[0], again.texts[0] = whole.ids[0][:5], whole.texts[0][:10]
        await again.read_rest(again.resume(cluster.routers[other_router], n=2))
    again.check_whole([whole.ids[choice] for choice in range(2)])


# --- beam search, whose requests are made by the client


def likeliest(ids: list[int]) -> list[Logprob]:
    """What the fake device reports after a prompt."""
    values = token_logprobs(expected_ids(ids, 1)[0], 4)
    return [Logprob(*one) for one in zip(values.top_ids, values.top_logprobs, strict=True)]


async def test_beam_search_asks_for_the_likeliest_tokens_of_each_beam(redis_url: str, pool: str) -> None:
    search = BeamSearch(BeamParams(2, 5, 1.0, False, frozenset({4})))
    while search.running:
        search.step([likeliest([*PROMPT, *output_ids]) for output_ids in search.running])
    async with run_cluster(redis_url, pool, shape=SHAPE) as cluster:
        async with AsyncClient(cluster.routers[0].address) as client:
            beams = await client.beam_search(token_ids=PROMPT, beams=2, max_tokens=5, stop_token_ids=[4])
            with pytest.raises(ValueError, match="beams: is 11"):
                await client.beam_search(token_ids=PROMPT, beams=11)
        await settled(*cluster.routers)
        cluster.executors[0].scheduler.check_when_idle()
    assert [beam.token_ids for beam in beams] == [beam.token_ids for beam in search.finished]
    assert [beam.score for beam in beams] == pytest.approx([beam.score for beam in search.finished])
    assert [beam.text for beam in beams] == ["".join(f"t{i}" for i in beam.token_ids) for beam in beams]
