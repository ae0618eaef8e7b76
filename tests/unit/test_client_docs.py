"""The examples of docs/client.md run, against a router that breaks off in the middle."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from inflight.common.errors import Reason, RequestError
from inflight.v1 import inference_pb2
from tests.unit.scripted_router import WORDS, ScriptedRouter, accepted, delta, ending, serving, started
from tests.unit.test_client_stats import message

PAGE = Path(__file__).parents[2] / "docs" / "client.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)

Events = Iterator[inference_pb2.StreamEvent]


def from_offset(offset: int, up_to: int = len(WORDS)) -> Events:
    yield accepted()
    yield started()
    for behind in range(offset, up_to):
        yield delta(WORDS[behind], behind)


class Breaking:
    """Breaks off twice: the first stream after two words, with the output kept, the next after four, with it lost."""

    def generate(self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Events:
        has = len(request.prior_output.output_ids)
        if has:
            assert request.prior_output.text_bytes == len("".join(WORDS[:has]).encode())
            yield from from_offset(has)
            yield from ending(len(WORDS))
            return
        yield from from_offset(0, 2)
        raise RequestError(Reason.DRAINING, "goes away")

    def resume(self, request: inference_pb2.ResumeRequest, context: grpc.ServicerContext) -> Events:
        has = request.offsets[0]
        assert request.text_bytes[0] == len("".join(WORDS[:has]).encode())
        if has >= 4:
            raise RequestError(Reason.OUTPUT_LOST, "no executor holds it")
        yield from from_offset(has, 4)
        raise RequestError(Reason.DRAINING, "goes away, too")


@pytest.mark.parametrize("number", [0, 1, 3])
def test_examples_bring_the_whole_answer_though_the_stream_breaks(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    breaking = Breaking()
    with serving(ScriptedRouter(breaking.generate, breaking.resume)) as address:
        run(EXAMPLES[number], address)
    assert capsys.readouterr().out.startswith("The capital is Paris.")


def test_the_example_of_another_process_goes_on_where_the_first_was(capsys: pytest.CaptureFixture[str]) -> None:
    def resume(request: inference_pb2.ResumeRequest, context: grpc.ServicerContext) -> Events:
        yield from from_offset(request.offsets[0])
        yield from ending(len(WORDS))

    with serving(ScriptedRouter(resume=resume)) as address:
        run(EXAMPLES[2], address)
    assert capsys.readouterr().out == "capital is Paris."


def test_the_example_of_statistics_looks_on_until_nothing_waits(capsys: pytest.CaptureFixture[str]) -> None:
    router = ScriptedRouter()
    busy = message()
    (idle := message()).ClearField("queues")
    router.stats = [busy, idle, busy]
    with serving(router) as address:
        run(EXAMPLES[4], address)
    assert capsys.readouterr().out == "<e0> [12.5]\n[('', 5)]\n<e0> [12.5]\n[]\n"


def test_every_example_is_run() -> None:
    assert len(EXAMPLES) == 5


def run(example: str, address: str) -> None:
    exec(compile(example.replace("localhost:50051", address), str(PAGE), "exec"), {"__name__": "__main__"})
