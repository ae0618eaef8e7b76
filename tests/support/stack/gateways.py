"""A gateway in the test's own process, in front of any routers, and what a plain HTTP client reads of its streams."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import openai

from inflight.common.http.port import HttpPort
from inflight.common.rpc.tls import TlsFiles
from inflight.gateway.app import GatewayApp
from inflight.gateway.batches.batches import open_batches
from inflight.gateway.conversion import defaults_of
from inflight.gateway.main import open_certificates, open_client, open_port
from inflight.gateway.metrics import Metrics
from inflight.gateway.responses.stored import stored_responses
from inflight.gateway.service import GatewayService
from inflight.gateway.settings import GatewaySettings

ANY_KEY = "no key"


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """A gateway that serves."""

    url: str
    app: GatewayApp
    port: HttpPort
    certificates: TlsFiles | None

    def openai(self, api_key: str = ANY_KEY, **options: Any) -> openai.AsyncOpenAI:
        """Returns OpenAI's own client of it, as users have it, without retries."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=api_key, **{"max_retries": 0, **options})

    async def drain(self, timeout_s: float) -> int:
        """Drains it, as a signal does. Returns the number of connections that are still in use."""
        self.app.drain()
        return await self.port.drain(timeout_s)


@asynccontextmanager
async def run_gateway(
    *routers: str, clock: Callable[[], float] = time.time, **settings: Any
) -> AsyncIterator[RunningGateway]:
    """A gateway on a free port. `clock` is the time of day for its batches."""
    chosen = GatewaySettings(listen="127.0.0.1:0", routers=routers, **settings)
    client, metrics = open_client(chosen), Metrics()
    try:
        async with (
            stored_responses(client, chosen, defaults_of(chosen), metrics) as stored,
            open_batches(client, chosen, metrics, clock) as batches,
        ):
            app = GatewayApp(GatewayService(client, chosen, metrics, stored, batches), chosen, metrics)
            certificates = open_certificates(chosen)
            port = open_port(app, chosen, certificates)
            address = await port.start(chosen.listen)
            scheme = "http" if certificates is None else "https"
            try:
                yield RunningGateway(f"{scheme}://{address}", app, port, certificates)
            finally:
                await port.stop()
    finally:
        await client.close()


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event of a stream, or a comment, of which `text` is all there is."""

    name: str
    text: str

    @property
    def value(self) -> Any:
        """What its JSON says."""
        return json.loads(self.text)


@asynccontextmanager
async def events_of(
    url: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> AsyncIterator[AsyncIterator[ServerSentEvent]]:
    """The events of a stream. Leaving the block leaves the stream."""
    async with (
        httpx2.AsyncClient(timeout=100) as http,
        http.stream("POST", url, json={"stream": True, **body}, headers=headers) as response,
    ):
        assert response.status_code == 200, await response.aread()
        yield _events(response)


async def _events(response: httpx2.Response) -> AsyncIterator[ServerSentEvent]:
    name, text = "", ""
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            name = line.removeprefix("id: ")
        elif line.startswith("data: "):
            text = line.removeprefix("data: ")
        elif line.startswith(": "):
            yield ServerSentEvent("", line)
        elif text:
            yield ServerSentEvent(name, text)
            name, text = "", ""


def text_of(events: list[ServerSentEvent]) -> str:
    """The text that chunks of a completion's one choice bring."""
    chunks = [event.value for event in events if event.text != "[DONE]" and not event.text.startswith(":")]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
