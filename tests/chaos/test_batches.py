"""A batch of a local stack of which a gateway, a router and an executor are killed in turn, with OpenAI's own client.

`TEST_BATCH_LINES=2000` runs a batch of so many lines.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any, Literal

import openai

from inflight.bench.fleet.tiny_model import NAME
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from tests.chaos.system import PATIENCE_S
from tests.chaos.test_background_responses import kill, model_with_template
from tests.support.stack.braked import ProcessBrake
from tests.support.stack.executors_linked import wait_for_executors

NUM_LINES = int(os.environ.get("TEST_BATCH_LINES", "200"))
ENDPOINT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
MAX_TOKENS = 10
# A step waits for its permission while sequences have as many tokens, so that the batch lasts until the last death.
BRAKED_FROM = 3
STEP_INTERVAL_S = 0.02
POLL_S = 0.1


def asked(number: int) -> dict[str, Any]:
    """The body of a line."""
    message = {"role": "user", "content": f"Tell me about {number}."}
    return {"model": NAME, "messages": [message], "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}


def input_file() -> bytes:
    lines = (
        {"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": asked(number)}
        for number in range(NUM_LINES)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def paced(brake: ProcessBrake) -> None:
    while True:
        brake.permit_next()
        await asyncio.sleep(STEP_INTERVAL_S)


async def until_completed(client: openai.AsyncOpenAI, batch_id: str, part: float) -> None:
    """Returns when a part of the batch is completed, which runs still."""
    async with asyncio.timeout(PATIENCE_S + NUM_LINES * 0.5):
        batch: Any = await client.batches.retrieve(batch_id)
        while batch.request_counts.completed < part * NUM_LINES:
            await asyncio.sleep(POLL_S)
            batch = await client.batches.retrieve(batch_id)
    assert batch.status == "in_progress"


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async with asyncio.timeout(PATIENCE_S + NUM_LINES * 0.5):
        while not (batch := await client.batches.retrieve(batch_id)).completed_at:
            assert batch.status in ("in_progress", "finalizing")
            await asyncio.sleep(POLL_S)
    return batch


async def test_every_line_has_one_result_over_the_death_of_each_role(tmp_path: Path) -> None:
    brake = ProcessBrake(tmp_path / "brake")
    options = StackOptions(
        executors=2,
        routers=2,
        gateways=2,
        model=str(model_with_template(tmp_path)),
        run_dir=tmp_path / "run",
        program=brake.program(BRAKED_FROM),
        executor_args=("--dtype", "float32", "--max-num-sequences", "8", "--max-tokens-in-paged-kv-cache", "4096"),
    )
    async with LocalStack(options) as stack:
        await wait_for_executors(stack.address, options.executors)
        first, client = (
            openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", timeout=PATIENCE_S)
            for address in stack.gateway_addresses
        )
        # Given a batch that one gateway drives
        brake.hold()
        pacing = asyncio.create_task(paced(brake))
        file = await first.files.create(file=("asked.jsonl", input_file()), purpose="batch")
        batch = await first.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
        # When that gateway, a router and an executor are killed in turn
        for part, child in ((0.05, stack.gateways[0]), (0.2, stack.routers[0]), (0.35, stack.executors[0])):
            await until_completed(client, batch.id, part)
            kill(child)
        await until_completed(client, batch.id, 0.4)
        pacing.cancel()
        brake.release()
        # Then every line has one result, which is that of the same request alone
        batch = await ended(client, batch.id)
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        assert (batch.status, batch.error_file_id) == ("completed", None)
        content = (await client.files.content(batch.output_file_id)).text
        results = [json.loads(line) for line in content.splitlines()]
        assert sorted(result["custom_id"] for result in results) == sorted(f"line-{n}" for n in range(NUM_LINES))
        bodies = {result["custom_id"]: result["response"]["body"] for result in results}
        assert {body["usage"]["completion_tokens"] for body in bodies.values()} == {MAX_TOKENS}
        for number in (0, NUM_LINES // 2, NUM_LINES - 1):
            alone = await client.post(f"/{ENDPOINT.removeprefix('/v1/')}", body=asked(number), cast_to=dict[str, Any])
            assert bodies[f"line-{number}"]["choices"] == alone["choices"]
        for one in (first, client):
            await one.close()
