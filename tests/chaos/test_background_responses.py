"""Background responses of a local stack whose gateways and executors are killed, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import openai

from inflight import AsyncClient
from inflight.bench.fleet.tiny_model import NAME, write_tiny_model
from inflight.local.options import StackOptions
from inflight.local.process import ChildProcess
from inflight.local.stack import LocalStack
from tests.chaos.system import BRAKED_FROM, PATIENCE_S, STEP_INTERVAL_S
from tests.support.stack.braked import ProcessBrake
from tests.support.stack.executors_linked import wait_for_executors

ASKED: dict[str, Any] = {
    "model": NAME,
    "input": "Tell me.",
    # More than are permitted while the other gateway takes over on a busy machine.
    "max_output_tokens": 800,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}


def model_with_template(folder: Path) -> Path:
    model = write_tiny_model(folder)
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    return model


def kill(child: ChildProcess) -> None:
    os.kill(child.pid, signal.SIGKILL)


async def events_until_text(stream: Any, brake: ProcessBrake, num_deltas: int) -> list[Any]:
    """The first events of a stream, while the brake is held."""
    events: list[Any] = []

    async def read() -> None:
        async for event in stream:
            events.append(event)
            if sum(one.type == "response.output_text.delta" for one in events) >= num_deltas:
                return

    async with asyncio.timeout(PATIENCE_S):
        reading = asyncio.create_task(read())
        while not reading.done():
            brake.permit_next()
            await asyncio.sleep(STEP_INTERVAL_S)
    await stream.close()
    return events


async def test_background_response_outlives_its_client_gateway_and_executor(tmp_path: Path) -> None:
    brake = ProcessBrake(tmp_path / "brake")
    options = StackOptions(
        executors=2,
        routers=1,
        gateways=2,
        model=str(model_with_template(tmp_path)),
        run_dir=tmp_path / "run",
        program=brake.program(BRAKED_FROM),
        executor_args=("--dtype", "float32", "--max-num-sequences", "4", "--max-tokens-in-paged-kv-cache", "2048"),
    )
    async with LocalStack(options) as stack, AsyncClient(*stack.router_addresses) as routers:
        await wait_for_executors(stack.address, options.executors)
        clients = [
            openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", timeout=PATIENCE_S)
            for address in stack.gateway_addresses
        ]
        direct = await clients[1].responses.create(store=False, **ASKED)
        # Given a response in the middle of its output
        brake.hold()
        stream = await clients[0].responses.create(background=True, stream=True, **ASKED)
        events = await events_until_text(stream, brake, BRAKED_FROM + 4)
        response_id = events[0].response.id
        # When its gateway is killed, and then the executor that runs it
        kill(stack.gateways[0])
        more = await clients[1].responses.retrieve(response_id, stream=True, starting_after=events[-1].sequence_number)
        events += await events_until_text(more, brake, 8)
        busy: list[str] = []
        async with asyncio.timeout(PATIENCE_S):
            while not busy:  # routers know the seats by the newest report
                executors = (await routers.capacity(model=NAME)).executors
                busy = [one.executor_id for one in executors if one.seats_used]
        kill(next(executor for executor in stack.executors if executor.name == busy[0]))
        brake.release()
        # Then the other gateway goes on with the other executor, and every event comes once
        async with asyncio.timeout(PATIENCE_S):
            rest: Any = await clients[1].responses.retrieve(
                response_id, stream=True, starting_after=events[-1].sequence_number
            )
            events += [event async for event in rest]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        response = await clients[1].responses.retrieve(response_id)
        assert text == response.output_text == direct.output_text
        assert response.usage is not None
        assert response.usage.output_tokens == ASKED["max_output_tokens"]
        for client in clients:
            await client.close()
