"""`inflight/service_config.json` in a plain gRPC channel, without our library: gRPC repeats on another router
what is safe to repeat, and never a Generate that has produced something."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from inflight.access import SERVICE_CONFIG
from inflight.v1 import inference_pb2, inference_pb2_grpc
from tests.unit.scripted_router import WORDS, ScriptedRouter, asked, serving

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0

# Says what it is asked and answers nothing, but two words where it is told to.
DYING = """
import threading
from tests.unit.scripted_router import ScriptedRouter, WORDS, accepted, delta, serving

class Dying(ScriptedRouter):
    def Tokenize(self, request, context):
        print("asked", flush=True)
        threading.Event().wait()

def script(request, context):
    print("asked", flush=True)
    if request.text == "speak":
        yield accepted("dying")
        yield delta(WORDS[0], 0)
        yield delta(WORDS[1], 1)
    threading.Event().wait()

with serving(Dying(script)) as address:
    print(address, flush=True)
    threading.Event().wait()
"""


class Dying:
    """A router process that holds what it is asked, and the lines that it prints."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._process = process
        self._lines = process.stdout
        self.address = self._lines.readline().strip()
        self.news: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def kill(self) -> None:
        self._process.kill()

    def _listen(self) -> None:
        for line in self._lines:
            self.news.put(line.strip())


@contextmanager
def dying_router() -> Iterator[Dying]:
    command = [sys.executable, "-c", DYING]
    environment = {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        try:
            yield Dying(process)
        finally:
            process.kill()


@contextmanager
def plain_stub(*addresses: str) -> Iterator[Any]:
    """A channel as any gRPC client opens it, with the file and no other setting of the client library."""
    options = [("grpc.service_config", SERVICE_CONFIG.read_text(encoding="utf-8")), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel("ipv4:" + ",".join(addresses), options) as channel:
        grpc.channel_ready_future(channel).result(WAIT_S)
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def until_asked(dying: Dying, call: Callable[[], Any]) -> Any:
    """Calls until the turn is the dying router's, and returns that call."""
    while True:
        made = call()
        made.add_done_callback(lambda _: dying.news.put("answered"))
        if dying.news.get(timeout=WAIT_S) == "asked":
            return made


def test_grpc_repeats_a_unary_call_of_a_killed_router_on_another() -> None:
    survivor = ScriptedRouter()
    with dying_router() as dying, serving(survivor) as other, plain_stub(dying.address, other) as stub:
        request = inference_pb2.TokenizeRequest(text="hi")
        call = until_asked(dying, lambda: stub.Tokenize.future(request, timeout=WAIT_S))
        dying.kill()
        assert list(call.result().token_ids) == list(b"hi")


def test_grpc_repeats_a_generate_that_has_produced_nothing() -> None:
    survivor = ScriptedRouter()
    request = inference_pb2.GenerateRequest(text="wait", idempotency_key="k")
    with dying_router() as dying, serving(survivor) as other, plain_stub(dying.address, other) as stub:
        call = until_asked(dying, lambda: Reading(stub.Generate(request, timeout=WAIT_S)))
        dying.kill()
        assert call.text() == "".join(WORDS)
    assert all(repeated == request for repeated in asked(survivor))


def test_grpc_never_repeats_a_generate_that_has_produced_tokens() -> None:
    survivor = ScriptedRouter()
    request = inference_pb2.GenerateRequest(text="speak")
    with dying_router() as dying, serving(survivor) as other, plain_stub(dying.address, other) as stub:
        call = until_asked(dying, lambda: Reading(stub.Generate(request, timeout=WAIT_S)))
        call.wait_for(2)
        num_asked = len(asked(survivor))
        dying.kill()
        with pytest.raises(grpc.RpcError) as broken:
            call.text()
        assert broken.value.code() is grpc.StatusCode.UNAVAILABLE
        assert call.num_deltas == 2
        assert not asked(survivor), f"one of {num_asked + 1} was asked for twice"


class Reading:
    """Reads a stream on a thread of its own, as far as it goes."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._texts: list[str] = []
        self._error: grpc.RpcError | None = None
        self._came = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def num_deltas(self) -> int:
        return len(self._texts)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._call.add_done_callback(callback)

    def wait_for(self, num_deltas: int) -> None:
        for _ in range(num_deltas):
            assert self._came.acquire(timeout=WAIT_S)

    def text(self) -> str:
        self._thread.join(WAIT_S)
        if self._error is not None:
            raise self._error
        return "".join(self._texts)

    def _read(self) -> None:
        try:
            for response in self._call:
                if response.event.HasField("delta"):
                    self._texts.append(response.event.delta.text)
                    self._came.release()
        except grpc.RpcError as error:
            self._error = error


@pytest.mark.parametrize("code", ["INTERNAL", "RESOURCE_EXHAUSTED", "ABORTED"])
def test_only_unavailable_is_repeated(code: str) -> None:
    class Refusing(ScriptedRouter):
        def Tokenize(
            self, request: inference_pb2.TokenizeRequest, context: grpc.ServicerContext
        ) -> inference_pb2.TokenizeResponse:
            self.requests.put(request)
            context.abort(grpc.StatusCode[code], "no")

    router = Refusing()
    with serving(router) as address, plain_stub(address) as stub, pytest.raises(grpc.RpcError) as refused:
        stub.Tokenize(inference_pb2.TokenizeRequest(text="hi"), timeout=WAIT_S)
    assert refused.value.code() is grpc.StatusCode[code]
    assert len(asked(router)) == 1


def test_every_rpc_of_the_client_api_is_in_the_file() -> None:
    config = json.loads(SERVICE_CONFIG.read_text(encoding="utf-8"))
    names = [(name["service"], name["method"]) for entry in config["methodConfig"] for name in entry["name"]]
    service = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
    assert {method for of, method in names if of == service.full_name} == {method.name for method in service.methods}
    assert len(names) == len(set(names))
