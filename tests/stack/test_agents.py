"""Coding agents from npm, unmodified, one for each API: an executor is killed in the middle of the call of a tool."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import httpx2
import pytest

from inflight import AsyncClient
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from inflight.local.state import read_state
from tests.integration.test_agents import CLAUDE_CODE, CODEX, OPENCODE, Agent, fetched
from tests.support.checkpoints.fixed_answers import save_fixed_model
from tests.support.stack.braked import ProcessBrake
from tests.support.stack.executors_linked import wait_for_executors
from tests.unit.test_tool_parser import BY_NAME, written

EXECUTOR_ARGS = (
    *("--dtype", "float32"),
    *("--max-tokens-in-paged-kv-cache", "65536"),
    *("--max-num-tokens", "2048"),
    *("--num-threads", "1"),
)
PATIENCE_S = 240.0
ROUTES = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
CALLS, ANSWERS = "<|calls|>", "<|answers|>"
# The model answers when it has the result, and calls the tool before.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if tools and 'the number is 4711' not in messages[-1].content %}<|calls|>{% else %}<|answers|>{% endif %}"
    "{% endif %}"
)


# The gateway resumes their streams whatever agent reads them.
@pytest.mark.parametrize("agent", [OPENCODE, CLAUDE_CODE, CODEX], ids=ROUTES)
async def test_agent_finishes_its_round_when_an_executor_is_killed_in_the_call(agent: Agent, tmp_path: Path) -> None:
    fetched(agent.package, agent.command)  # or the test is skipped
    secret = tmp_path / "secret.txt"
    secret.write_text("the number is 4711\n")
    texts = {CALLS: "I read it.\n" + written(BY_NAME["hermes"], [agent.call(secret)]), ANSWERS: "It is 4711."}
    num_tokens = save_fixed_model(tmp_path / "fixed", texts, TEMPLATE)[CALLS]
    brake = ProcessBrake(tmp_path / "brake")
    options = StackOptions(
        executors=2,
        gateways=1,
        model=str(tmp_path / "fixed"),
        executor_args=EXECUTOR_ARGS,
        run_dir=tmp_path / "run",
        program=brake.program(num_tokens * 2 // 3),
    )
    async with LocalStack(options) as stack:
        await wait_for_executors(stack.address, options.executors)
        brake.hold()
        url = f"http://{stack.gateway_addresses[0]}"
        running = asyncio.create_task(agent.run(url, "fixed", tmp_path))
        async with asyncio.timeout(PATIENCE_S):
            await brake.until_waited_for()
            os.kill(await pid_of_the_busy_executor(stack, options), signal.SIGKILL)
        brake.release()
        assert "It is 4711." in await running
        # It has not sent its request again: its stream went on.
        async with httpx2.AsyncClient(timeout=PATIENCE_S) as http:
            metrics = (await http.get(f"{url}/metrics")).text
        counted = re.findall(
            r'^inflight_gateway_requests_total{route="(/v1/[^"]*)",status="(\d+)"} (\S+)', metrics, re.M
        )
        assert [(status, float(count)) for route, status, count in counted if route in ROUTES] == [("200", 2)]


async def pid_of_the_busy_executor(stack: LocalStack, options: StackOptions) -> int:
    async with AsyncClient(stack.address) as client:
        while not (busy := [one for one in (await client.capacity()).executors if one.seats_used]):
            await asyncio.sleep(0.01)
    state = read_state(options.run_dir)
    assert state is not None
    return next(one.pid for one in state.processes if one.name == busy[0].executor_id)
