"""Streams with several tokens per event, whose executor sends several steps in a frame: exactly once all the same."""

from __future__ import annotations

from inflight.common.protocol import MAX_FRAME_INTERVAL
from inflight.v1 import executor_pb2, inference_pb2
from tests.integration.test_resuming import NUM_TOKENS, PROMPT, Client, request_of
from tests.integration.test_resuming import begun as begin
from tests.support.stack.cluster import run_cluster

INTERVAL = 4
OUTPUT = inference_pb2.OutputOptions(text=True, token_ids=True, stream_interval=INTERVAL)


def event_sizes(client: Client) -> list[int]:
    return [event.delta.num_tokens for event in client.events if event.HasField("delta")]


async def test_events_have_the_interval_and_the_end_has_the_rest(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        client, call = await begin(cluster, 1, output=OUTPUT)
        cluster.executors[0].brake.release()
        await client.read_rest(call)
    client.check_whole(PROMPT, NUM_TOKENS)
    # Between the first event and the end; tokens of a router that falls behind share events.
    assert all(size >= INTERVAL for size in event_sizes(client)[1:-1])


async def test_executor_is_told_how_long_tokens_may_wait(
    redis_url: str, pool: str, submits: list[executor_pb2.Submit]
) -> None:
    default, some, many, stopped = request_of(), request_of(output=OUTPUT), request_of(), request_of(output=OUTPUT)
    many.output.stream_interval = 1000
    # The router finds stop strings, and the executor would compute beyond them.
    stopped.stopping.stop.append("never")
    async with run_cluster(redis_url, pool) as cluster:
        for request in (default, some, many, stopped):
            await Client().read_rest(cluster.routers[0].stub.Generate(request))
    assert [submit.stream_interval for submit in submits] == [1, INTERVAL, MAX_FRAME_INTERVAL, 1]


async def test_waiting_tokens_are_not_lost_with_their_router(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, routers=2) as cluster:
        # Given tokens behind the first event that wait on the executor
        client, _ = await begin(cluster, 1, output=OUTPUT)
        cluster.executors[0].brake.permit(2)
        await cluster.routers[0].kill()
        resumed = client.resume(cluster.routers[1])
        client.take((await resumed.read()).event)
        cluster.executors[0].brake.release()
        await client.read_rest(resumed)
    client.check_whole(PROMPT, NUM_TOKENS)


async def test_waiting_tokens_are_generated_again_if_their_executor_dies(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, executors=2) as cluster:
        client, call = Client(), cluster.routers[0].stub.Generate(request_of(output=OUTPUT))
        for executor in cluster.executors:
            executor.brake.hold()
            executor.brake.permit(4)
        await client.read_tokens(call, 1)
        (first,) = (executor for executor in cluster.executors if executor.device.boarded)
        (other,) = (executor for executor in cluster.executors if executor is not first)
        await first.stop()
        other.brake.release()
        await client.read_rest(call)
    client.check_whole(PROMPT, NUM_TOKENS)
