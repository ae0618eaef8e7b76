"""A router process is killed in mid-stream; the client's user sees the next token, from another one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from inflight import aio, sync
from inflight.common.errors import Reason, RequestError
from inflight.events import Delta
from inflight.v1 import inference_pb2
from tests.unit.scripted_router import WORDS, ScriptedRouter, accepted, delta, ending, serving

ROOT = Path(__file__).parents[2]

# Says two words, tells its process's parent that it has, and hangs.
HANGING = """
import sys, threading
from tests.unit.scripted_router import ScriptedRouter, WORDS, accepted, delta, serving

def script(request, context):
    yield accepted()
    yield delta(WORDS[0], 0)
    yield delta(WORDS[1], 1)
    threading.Event().wait()

with serving(ScriptedRouter(script)) as address:
    print(address, flush=True)
    threading.Event().wait()
"""


@contextmanager
def hanging_router() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A process that serves, and its address."""
    command, path = [sys.executable, "-c", HANGING], {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=path) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def resumes(request: inference_pb2.ResumeRequest, context: grpc.ServicerContext) -> Iterator[inference_pb2.StreamEvent]:
    yield accepted()
    for offset in range(request.offsets[0], len(WORDS)):
        yield delta(WORDS[offset], offset)
    yield from ending(len(WORDS))


def continues(
    request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
) -> Iterator[inference_pb2.StreamEvent]:
    """Takes nothing new, so that requests begin at the other router."""
    if not request.prior_output.output_ids:
        raise RequestError(Reason.DRAINING, "takes nothing new")
    yield accepted()
    for offset in range(len(request.prior_output.output_ids), len(WORDS)):
        yield delta(WORDS[offset], offset)
    yield from ending(len(WORDS))


@pytest.mark.parametrize("holds_output", [True, False])
async def test_a_killed_router_is_followed_by_another(holds_output: bool) -> None:
    survivor = ScriptedRouter(continues, resumes if holds_output else None)
    with ExitStack() as opened:
        dying, process = await asyncio.to_thread(opened.enter_context, hanging_router())
        other = opened.enter_context(serving(survivor))
        async with aio.AsyncClient(dying, other) as client, asyncio.timeout(60):
            stream = client.generate("hi", want_token_ids=True)
            async for event in stream.events():
                if isinstance(event, Delta) and event.offset == 1:
                    process.kill()
    assert stream.transcript.choices[0].text == "".join(WORDS)
    assert stream.transcript.choices[0].token_ids == [100, 101, 102, 103, 104]
    assert stream.num_resumes == 1


def test_the_sync_client_does_the_same() -> None:
    survivor = ScriptedRouter(continues, resumes)
    with hanging_router() as (dying, process), serving(survivor) as other, sync.Client(dying, other) as client:
        stream = client.generate("hi")
        for delta in stream:
            if delta.offset == 1:
                process.kill()
        assert stream.transcript.choices[0].text == "".join(WORDS)
        assert stream.num_resumes == 1
