"""Streams that outlive their router: resumed, taken over, repeated and carried on by the client, exactly once."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from inflight.executor.adapters.folder import AdapterFolder, KnownAdapter
from inflight.executor.adapters.store import AdapterStore
from inflight.executor.adapters.weights import AdapterWeights
from inflight.router.dispatch import dispatcher as dispatch
from inflight.v1 import inference_pb2, types_pb2
from tests.integration.test_requests import collect, expected_ids, ids_of, rest
from tests.support.stack.cluster import Cluster, ExecutorShape, RunningRouter, run_cluster, token_request

PROMPT = [1, 2, 3]
NUM_TOKENS = 20


class Client:
    """Reads one stream and checks that every token and every character comes once."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.events: list[inference_pb2.StreamEvent] = []
        self.request_id = ""
        self.token = ""

    def take(self, event: inference_pb2.StreamEvent) -> None:
        self.events.append(event)
        if event.HasField("accepted"):
            self.request_id, self.token = event.accepted.request_id, event.accepted.resume_token
        if event.HasField("delta"):
            assert event.delta.offset == len(self.ids)
            self.ids.extend(event.delta.token_ids)
            self.text += event.delta.text

    async def read_tokens(self, call: Any, num_tokens: int) -> None:
        while len(self.ids) < num_tokens:
            self.take((await call.read()).event)

    async def read_rest(self, call: Any) -> None:
        for event in await rest(call):
            self.take(event)

    def resume(self, router: RunningRouter, **fields: Any) -> Any:
        place = {"offsets": [len(self.ids)], "text_bytes": [len(self.text.encode())]}
        named = {"request_id": self.request_id, "resume_token": self.token}
        return router.stub.Resume(inference_pb2.ResumeRequest(**{**named, **place, **fields}))

    def check_whole(self, prompt_ids: list[int], num_tokens: int, salt: bytes = b"default\0") -> None:
        assert self.ids == expected_ids(prompt_ids, num_tokens, salt)
        assert self.text == "".join(f"t{token}" for token in self.ids)
        assert self.events[-2].finished.reason == types_pb2.FINISH_REASON_LENGTH
        usage = self.events[-1].done.usage
        assert (usage.prompt_tokens, usage.output_tokens) == (len(prompt_ids), num_tokens)


def request_of(**fields: Any) -> inference_pb2.GenerateRequest:
    return token_request(PROMPT, NUM_TOKENS, **fields)


async def begun(cluster: Cluster, num_tokens: int, router: int = 0, **fields: Any) -> tuple[Client, Any]:
    """A request that has brought so many tokens, and stands still."""
    client, brake = Client(), cluster.executors[0].brake
    brake.hold()
    call = cluster.routers[router].stub.Generate(request_of(**fields))
    brake.permit(num_tokens + 1)
    await client.read_tokens(call, num_tokens)
    return client, call


async def status_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    return caught.value


async def test_stream_of_a_dead_router_goes_on_at_another_from_the_next_offset(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, routers=2) as cluster:
        client, call = await begun(cluster, 5)
        await cluster.routers[0].kill()
        assert (await status_of(call)).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        resumed = client.resume(cluster.routers[1])
        first = (await resumed.read()).event
        assert first.accepted == client.events[0].accepted
        cluster.executors[0].brake.release()
        await client.read_rest(resumed)
    client.check_whole(PROMPT, NUM_TOKENS)


@pytest.mark.parametrize("other_router", [False, True])
async def test_stream_that_is_resumed_elsewhere_ends_for_its_first_reader(
    redis_url: str, pool: str, other_router: bool
) -> None:
    async with run_cluster(redis_url, pool, routers=2) as cluster:
        client, call = await begun(cluster, 5)
        resumed = client.resume(cluster.routers[other_router])
        client.take((await resumed.read()).event)
        error = await status_of(call)
        assert error.code() is grpc.StatusCode.ABORTED
        cluster.executors[0].brake.release()
        await client.read_rest(resumed)
        streams = [router.pools.by_name[pool].dispatcher.streams for router in cluster.routers]
    client.check_whole(PROMPT, NUM_TOKENS)
    assert streams == [(), ()]


async def test_stream_can_go_back_and_forth_between_routers(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, routers=2) as cluster:
        client, _ = await begun(cluster, 3)
        for turn in (1, 0, 1, 0):
            call = client.resume(cluster.routers[turn])
            cluster.executors[0].brake.permit(3)
            await client.read_tokens(call, len(client.ids) + 2)
        cluster.executors[0].brake.release()
        await client.read_rest(call)
    client.check_whole(PROMPT, NUM_TOKENS)


@pytest.mark.parametrize("other_router", [False, True])
async def test_stream_that_has_ended_can_be_read_again(redis_url: str, pool: str, other_router: bool) -> None:
    async with run_cluster(redis_url, pool, routers=2) as cluster:
        whole = Client()
        await whole.read_rest(cluster.routers[0].stub.Generate(request_of()))
        again = Client()
        again.request_id, again.token = whole.request_id, whole.token
        again.ids, again.text = whole.ids[:7], whole.text[:14]
        await again.read_rest(again.resume(cluster.routers[other_router]))
    again.check_whole(PROMPT, NUM_TOKENS)
    assert again.events[0].accepted == whole.events[0].accepted


async def test_resume_without_byte_count_begins_behind_the_text_of_the_tokens(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        client, _ = await begun(cluster, 5)
        resumed = client.resume(cluster.routers[0], text_bytes=[])
        cluster.executors[0].brake.release()
        await client.read_rest(resumed)
    client.check_whole(PROMPT, NUM_TOKENS)


async def test_offset_beyond_the_output_is_refused_and_takes_nothing_over(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        client, call = await begun(cluster, 5)
        error = await status_of(client.resume(cluster.routers[0], offsets=[NUM_TOKENS + 1]))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        cluster.executors[0].brake.release()
        await client.read_rest(call)
    client.check_whole(PROMPT, NUM_TOKENS)


async def test_wrong_token_is_as_good_as_none(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        client, call = await begun(cluster, 2)
        for token in ("", "x", client.token[:-2] + "AA"):
            error = await status_of(client.resume(cluster.routers[0], resume_token=token))
            assert (error.code(), error.details()) == (
                grpc.StatusCode.NOT_FOUND,
                "request_id: there is no such request, or this is not its resume_token",
            )
        call.cancel()
        cluster.executors[0].brake.release()


async def test_output_that_no_process_holds_is_lost(redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "LINK_WAIT_S", 0.05)
    async with run_cluster(redis_url, pool, routers=2) as cluster:
        client, _ = await begun(cluster, 5)
        await cluster.routers[0].kill()
        await cluster.executors[0].stop()
        error = await status_of(client.resume(cluster.routers[1]))
    assert error.code() is grpc.StatusCode.DATA_LOSS


# --- repeats


async def test_repeat_reads_the_running_request_from_its_beginning(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, routers=2) as cluster:
        _, call = await begun(cluster, 5, idempotency_key="k")
        for router in cluster.routers:
            before, call = call, router.stub.Generate(request_of(idempotency_key="k"))
            client = Client()
            await client.read_tokens(call, 5)
            assert (await status_of(before)).code() is grpc.StatusCode.ABORTED
        cluster.executors[0].brake.release()
        await client.read_rest(call)
        steps = cluster.executors[0].engine.num_steps
        client.check_whole(PROMPT, NUM_TOKENS)
        # And once it has ended
        for router in cluster.routers:
            again = Client()
            await again.read_rest(router.stub.Generate(request_of(idempotency_key="k")))
            again.check_whole(PROMPT, NUM_TOKENS)
        assert cluster.executors[0].engine.num_steps == steps


@pytest.mark.parametrize("other_router", [False, True])
@pytest.mark.parametrize("has_ended", [False, True])
async def test_key_of_another_request_is_refused(
    redis_url: str, pool: str, other_router: bool, has_ended: bool
) -> None:
    async with run_cluster(redis_url, pool, routers=2) as cluster:
        client, call = await begun(cluster, 2, idempotency_key="k")
        if has_ended:
            cluster.executors[0].brake.release()
            await client.read_rest(call)
        stub = cluster.routers[other_router].stub
        error = await status_of(stub.Generate(token_request(PROMPT, NUM_TOKENS + 1, idempotency_key="k")))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        assert "idempotency_key" in (error.details() or "")
        cluster.executors[0].brake.release()
        await client.read_rest(call)
    client.check_whole(PROMPT, NUM_TOKENS)


class Adapters:
    """The folder of an executor's adapters, as `AdapterStore` reads it."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def look(self) -> tuple[KnownAdapter, ...]:
        return tuple(KnownAdapter(name, sha256(name.encode()).hexdigest(), 4, Path(name)) for name in self.names)

    def read(self, adapter: KnownAdapter) -> AdapterWeights:
        return AdapterWeights(())


async def until_served(cluster: Cluster, store: AdapterStore, *names: str) -> None:
    """Waits until all routers know of exactly these adapters."""
    store.look()
    async with asyncio.timeout(60):
        for router in cluster.routers:
            while [*next(iter(router.pools.by_name.values())).adapters] != [*names]:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("named", ["by the field", "in the model's name"])
async def test_repeat_finds_the_running_request_while_its_adapter_is_absent(
    redis_url: str, pool: str, named: str
) -> None:
    # Given a request with an adapter that runs, and the adapter's folder removed
    folder = Adapters("sql", "tone")
    store = AdapterStore(cast(AdapterFolder, folder), 2, lambda slot, adapter, weights: None)
    shape = ExecutorShape(adapters=store)
    fields: dict[str, Any] = {"adapter_id": "sql"} if named == "by the field" else {"model": f"{pool}:sql"}
    async with run_cluster(redis_url, pool, routers=2, shape=shape) as cluster:
        await until_served(cluster, store, "sql", "tone")
        _, call = await begun(cluster, 5, idempotency_key="k", **fields)
        folder.names = ("tone",)
        await until_served(cluster, store, "tone")
        # Then a repeat reads it at its router, and at another
        for router in cluster.routers:
            before, call = call, router.stub.Generate(request_of(idempotency_key="k", **fields))
            client = Client()
            await client.read_tokens(call, 5)
            assert (await status_of(before)).code() is grpc.StatusCode.ABORTED
            # And no other request gets the adapter, nor does one with the same key
            other_key = router.stub.Generate(request_of(idempotency_key="l", **fields))
            assert "has no adapter 'sql'; its adapters: tone" in ((await status_of(other_key)).details() or "")
            same_key = router.stub.Generate(token_request(PROMPT, 4, idempotency_key="k", **fields))
            assert (await status_of(same_key)).code() is grpc.StatusCode.ALREADY_EXISTS
        cluster.executors[0].brake.release()
        await client.read_rest(call)
        client.check_whole(PROMPT, NUM_TOKENS)
        # And once it has ended
        for router in cluster.routers:
            again = Client()
            await again.read_rest(router.stub.Generate(request_of(idempotency_key="k", **fields)))
            again.check_whole(PROMPT, NUM_TOKENS)
        assert store.num_held == 0


async def test_repeat_of_a_waiting_request_keeps_its_place(redis_url: str, pool: str) -> None:
    shape = ExecutorShape(max_num_sequences=1)
    async with run_cluster(redis_url, pool, routers=2, shape=shape) as cluster:
        # Given one that runs, one that waits, and one behind it
        first, running = await begun(cluster, 2)
        waiting = request_of(idempotency_key="k", want_queue_events=True)
        call = cluster.routers[0].stub.Generate(waiting)
        queued = (await call.read()).event.queued
        assert queued.resume_token
        behind = cluster.routers[0].stub.Generate(token_request([4], 3, want_queue_events=True))
        assert (await behind.read()).event.queued.position == 1
        # When it is repeated on another router
        repeated = cluster.routers[1].stub.Generate(waiting)
        again = (await repeated.read()).event.queued
        assert (again.position, again.request_id, again.resume_token) == (0, queued.request_id, queued.resume_token)
        assert (await status_of(call)).code() is grpc.StatusCode.ABORTED
        # Then it is still served first
        cluster.executors[0].brake.release()
        await first.read_rest(running)
        client = Client()
        await client.read_rest(repeated)
        await rest(behind)
        boarded = cluster.executors[0].device.boarded
    client.check_whole(PROMPT, NUM_TOKENS)
    assert boarded.index(queued.request_id) == 1


async def test_repeat_of_a_cancelled_request_starts_it_anew(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        _, call = await begun(cluster, 5, idempotency_key="k")
        call.cancel()
        repeated = cluster.routers[0].stub.Generate(request_of(idempotency_key="k"))
        cluster.executors[0].brake.release()
        client = Client()
        await client.read_rest(repeated)
    client.check_whole(PROMPT, NUM_TOKENS)


# --- output that the client brings


@pytest.mark.parametrize("key", ["", "k"])
async def test_client_goes_on_with_the_output_that_it_has(redis_url: str, pool: str, key: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        client, ids = Client(), expected_ids(PROMPT, NUM_TOKENS)
        client.ids, client.text = ids[:6], "".join(f"t{token}" for token in ids[:6])
        prior = inference_pb2.PriorOutput(output_ids=client.ids)
        await client.read_rest(cluster.routers[0].stub.Generate(request_of(prior_output=prior, idempotency_key=key)))
    client.check_whole(PROMPT, NUM_TOKENS)


async def test_repeat_with_output_reads_on_where_the_request_runs(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, routers=2) as cluster:
        client, _ = await begun(cluster, 6, idempotency_key="k")
        await cluster.routers[0].kill()
        prior = inference_pb2.PriorOutput(output_ids=client.ids, text_bytes=len(client.text))
        call = cluster.routers[1].stub.Generate(request_of(prior_output=prior, idempotency_key="k"))
        cluster.executors[0].brake.release()
        await client.read_rest(call)
        assert len(cluster.executors[0].device.boarded) == 1
    client.check_whole(PROMPT, NUM_TOKENS)


async def test_prior_output_that_has_come_to_its_end_is_not_run(redis_url: str, pool: str) -> None:
    ids = expected_ids(PROMPT, NUM_TOKENS)
    text = "".join(f"t{token}" for token in ids)
    async with run_cluster(redis_url, pool) as cluster:
        stub = cluster.routers[0].stub
        full = request_of(prior_output=inference_pb2.PriorOutput(output_ids=ids))
        events = await collect(cluster.routers[0], full)
        assert [event.WhichOneof("event") for event in events] == ["accepted", "finished", "done"]
        assert events[1].finished.reason == types_pb2.FINISH_REASON_LENGTH
        assert events[2].done.usage.output_tokens == NUM_TOKENS

        stopped = request_of(prior_output=inference_pb2.PriorOutput(output_ids=ids[:5], text_bytes=3))
        stopped.stopping.stop.append(text[4:6])
        events = await collect(cluster.routers[0], stopped)
        assert "".join(event.delta.text for event in events) == text[3 : text.index(text[4:6])]
        assert events[-2].finished.stop == text[4:6]

        by_token = request_of(prior_output=inference_pb2.PriorOutput(output_ids=ids[:5]))
        by_token.stopping.stop_token_ids.append(ids[4])
        events = await collect(cluster.routers[0], by_token)
        assert events[-2].finished.stop_token_id == ids[4]
        assert events[-1].done.usage.output_tokens == ids.index(ids[4]) + 1

        too_long = request_of(prior_output=inference_pb2.PriorOutput(output_ids=[*ids, 1]))
        assert (await status_of(stub.Generate(too_long))).code() is grpc.StatusCode.INVALID_ARGUMENT
        assert cluster.executors[0].device.boarded == []


# --- without a client


async def test_detached_request_runs_to_its_end_without_a_client(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        client, call = await begun(cluster, 3, detach=True)
        call.cancel()
        cluster.executors[0].brake.release()
        await ledger_is_empty(cluster)
        await client.read_rest(client.resume(cluster.routers[0]))
    client.check_whole(PROMPT, NUM_TOKENS)


async def test_request_whose_client_stays_away_too_long_is_cancelled(redis_url: str, pool: str) -> None:
    request = request_of()
    request.resume_ttl.FromMilliseconds(50)
    async with run_cluster(redis_url, pool) as cluster:
        cluster.executors[0].brake.hold()
        client, call = Client(), cluster.routers[0].stub.Generate(request)
        cluster.executors[0].brake.permit(4)
        await client.read_tokens(call, 3)
        call.cancel()
        async with asyncio.timeout(60):  # its steps go on only when the cancel is there
            while cluster.executors[0].engine._inbox.empty():
                await asyncio.sleep(0)
        cluster.executors[0].brake.release()
        await ledger_is_empty(cluster)
        resumed = [event async for event in events_of(client.resume(cluster.routers[0]))]
    assert [event.finished.reason for event in resumed if event.HasField("finished")] == [
        types_pb2.FINISH_REASON_CANCELLED
    ]


async def ledger_is_empty(cluster: Cluster) -> None:
    """Waits until no request waits or runs."""
    (pool,) = cluster.routers[0].pools.by_name.values()
    async with asyncio.timeout(60):
        while True:
            snapshot = await pool.dispatcher.snapshot()
            if not pool.dispatcher.streams and not any(one.reserved_blocks for one in snapshot.executors):
                return
            await asyncio.sleep(0.005)


async def events_of(call: Any) -> Any:
    for event in await rest(call):
        yield event


# --- drain


async def test_drained_router_leaves_its_streams_to_another(redis_url: str, pool: str) -> None:
    shape = ExecutorShape(max_num_sequences=1)
    async with run_cluster(redis_url, pool, routers=2, shape=shape) as cluster:
        # Given a stream that runs, and two that wait, of which one can be repeated
        client, call = await begun(cluster, 4)
        draining, other = cluster.routers
        kept = draining.stub.Generate(token_request([4], 3, idempotency_key="k", want_queue_events=True))
        assert (await kept.read()).event.HasField("queued")
        withdrawn = draining.stub.Generate(token_request([0], 3, want_queue_events=True))
        assert (await withdrawn.read()).event.HasField("queued")
        # When the router drains
        drain = asyncio.create_task(draining.service.drain(0.05))
        for waiting in (kept, withdrawn):
            assert reason_of(await status_of(waiting)) == "DRAINING"
        assert reason_of(await status_of(draining.stub.Generate(request_of()))) == "DRAINING"
        await drain
        error = await status_of(call)
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        await draining.kill()
        # Then the stream goes on elsewhere, and who waited keeps its place
        resumed = client.resume(other)
        client.take((await resumed.read()).event)
        repeated = other.stub.Generate(token_request([4], 3, idempotency_key="k", want_queue_events=True))
        assert (await repeated.read()).event.queued.position == 0
        cluster.executors[0].brake.release()
        await client.read_rest(resumed)
        assert ids_of(await rest(repeated)) == expected_ids([4], 3)
    client.check_whole(PROMPT, NUM_TOKENS)


def reason_of(error: grpc.aio.AioRpcError) -> str:
    details = dict(error.trailing_metadata())["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(details)
    info = error_details_pb2.ErrorInfo()
    status.details[0].Unpack(info)
    return str(info.reason)
