"""A router in virtual time: the real dispatcher, its store and its links, on an event loop that runs on the timeline.

One object is one start of a router; a restart is another with a new id. Three ends are modelled: Redis' client
(`VirtualRedis`), the stream of a link (`Session`) and the calls of clients, which are told to the checker. Whatever
the router awaits is an event of the timeline, so the process can die in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from inflight.bench.simulation.client import SimClient
from inflight.bench.simulation.invariants import InvariantChecker, RequestOutcome
from inflight.bench.simulation.session import TO_EXECUTOR, Session
from inflight.bench.simulation.sim_link import SimLink
from inflight.bench.simulation.store_link import StoreLink
from inflight.bench.simulation.virtual_redis import VirtualRedis
from inflight.bench.timeline.timeline import US_PER_MS, US_PER_S, Process, Timeline
from inflight.bench.timeline.traffic import SimRequest
from inflight.bench.timeline.virtual_loop import VirtualLoop
from inflight.common.errors import Reason, RequestError
from inflight.executor.scheduler.sequence import FinishReason
from inflight.router.dispatch.dispatcher import Dispatcher
from inflight.router.ledger.calls import Turns
from inflight.router.ledger.codec import Argument, Reply
from inflight.router.ledger.redis_ledger import RedisLedger
from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import LedgerEvent
from inflight.router.lifecycle.events import DEADLINE_END
from inflight.router.stream.request_stream import Reader
from inflight.v1 import executor_pb2

OUTCOMES = {
    FinishReason.STOP_TOKEN: RequestOutcome.COMPLETED,
    FinishReason.STOP_STRING: RequestOutcome.COMPLETED,
    FinishReason.LENGTH: RequestOutcome.COMPLETED,
    FinishReason.CANCELLED: RequestOutcome.CANCELLED,
    FinishReason.DEADLINE: RequestOutcome.EXPIRED,
    FinishReason.ERROR: RequestOutcome.FAILED,
}
REFUSALS = frozenset({Reason.QUEUE_FULL, Reason.RATE_LIMITED, Reason.DEADLINE_UNMEETABLE, Reason.NEVER_FITS})


@dataclass(frozen=True, slots=True)
class RouterShape:
    """How routers behave; `block_size` is that of the executors."""

    block_size: int = 16
    max_attempts: int = 3
    no_executor_grace_us: int = 10 * US_PER_S
    store: LedgerSettings = field(default_factory=lambda: LedgerSettings(max_queue_requests=1_000_000))


class SimRouter:
    """One start of a router."""

    def __init__(
        self, router_id: str, shape: RouterShape, link: StoreLink, timeline: Timeline, checker: InvariantChecker
    ) -> None:
        self.router_id = router_id
        self.process = Process(timeline)
        self.links: dict[Session, SimLink] = {}
        self._shape = shape
        self._timeline = timeline
        self._checker = checker
        self._clients: dict[str, SimClient] = {}
        self.loop = VirtualLoop(timeline, self.process)  # type: ignore[abstract]
        redis: Any = VirtualRedis(link, self.process, self.loop, link.keys.mailbox(router_id))

        def open_ledger(on_event: Callable[[LedgerEvent], None]) -> RedisLedger:
            settings = shape.store
            return _Ledger(
                redis,
                link.keys.pool,
                router_id,
                settings,
                lambda event: self._deliver(on_event, event),
                link.scripts,
                turns=Turns(settings, self.loop.time),
                reader=redis,
            )

        self.dispatcher = Dispatcher(open_ledger, shape.max_attempts, shape.no_executor_grace_us / US_PER_S)

    def start(self) -> None:
        """Runs until the process dies."""
        self.loop.start(self.dispatcher.run())

    def close(self) -> None:
        """Ends the process and what it awaits."""
        self.process.kill()
        self.loop.close()

    def die(self) -> None:
        """Ends the process, and tells its clients."""
        for client in self._clients.values():
            self._end(client, RequestOutcome.ROUTER_LOST)
        self.close()

    def _deliver(self, on_event: Callable[[LedgerEvent], None], event: LedgerEvent) -> None:
        """A router logs an event that it cannot apply, and goes on. Here it ends the simulation."""
        try:
            on_event(event)
        except Exception as error:
            self._timeline.after(0, _raise, error)
            raise

    @property
    def streams(self) -> Mapping[str, SimClient]:
        """The requests that it serves, and those whose submit has no answer, which may have run and ended."""
        served = {stream.request_id for stream in self.dispatcher.streams}
        served |= {life.request_id for life in self.dispatcher._submitting}
        self._clients = {key: one for key, one in self._clients.items() if key in served or not one.has_ended}
        return {request_id: one for request_id, one in self._clients.items() if request_id in served}

    # What clients do.

    def arrive(self, request: SimRequest) -> None:
        """A client's request."""
        record = self._checker.submitted(request, self.router_id, self._timeline.now_us)
        ledger = cast(_Ledger, self.dispatcher._ledger)
        client = SimClient(
            request, record, self._shape.block_size, self._timeline, self._checker, ledger.asked_us.__getitem__
        )
        self._clients[request.request_id] = client
        call = self.loop.start(self._serve(client))
        if request.gone_after_us is not None:
            self._timeline.after(request.gone_after_us, self.process.run, self._client_gone, client, call)

    def _client_gone(self, client: SimClient, call: asyncio.Task[None]) -> None:
        if not client.has_ended:
            client.record.may_be_cancelled = True
            self._end(client, RequestOutcome.CANCELLED, "client gone")
            call.cancel()

    async def _serve(self, client: SimClient) -> None:
        """Submits a request and reads its output to its end, as `inflight.router.api.service` does."""
        stream, record, reader = client.stream, client.record, Reader()
        stream.attend(reader)
        try:
            await self.dispatcher.submit(stream)
            try:
                await self._read(client, reader)
            finally:
                self.dispatcher.leave(stream, reader)
        except RequestError as error:
            is_refusal = record.accepted_us is None and error.reason in REFUSALS
            self._end(client, RequestOutcome.REFUSED if is_refusal else RequestOutcome.FAILED, error.reason.value)

    async def _read(self, client: SimClient, reader: Reader) -> None:
        """Reads the output, as `inflight.router.stream.relay` does: the first token has a deadline."""
        stream, deadline_ms = client.stream, client.request.first_token_deadline_ms
        due_s = None if deadline_ms is None else stream.clock.arrived + deadline_ms * US_PER_MS / US_PER_S
        while True:
            try:
                async with asyncio.timeout_at(None if stream.output_ids or stream.has_ended else due_s):
                    await stream.changed(reader)
            except TimeoutError:
                stream.finish(DEADLINE_END)
                self._end(client, RequestOutcome.EXPIRED, "by the router")
                return
            news = stream.take(reader)
            for offset, token_id in enumerate(news.token_ids, news.offset):
                self._checker.delivered(client.record, offset, token_id, self._timeline.now_us)
            if news.error is not None:
                raise news.error
            if news.end is not None:
                reason = TO_EXECUTOR[news.end.reason]
                self._end(client, OUTCOMES[reason], reason.value)
                return

    def _end(self, client: SimClient, outcome: RequestOutcome, reason: str = "") -> None:
        if not client.has_ended:
            self._checker.ended(client.record, outcome, self._timeline.now_us, reason)

    # What executors do.

    def on_linked(self, session: Session) -> None:
        """An executor can be used."""
        self.links[session] = SimLink(session, self.dispatcher, self.loop)

    def on_unlinked(self, session: Session) -> None:
        """The stream broke."""
        if session in self.links:
            self.loop.run(self.links.pop(session).cut)

    def on_response(self, session: Session, response: executor_pb2.ServeResponse) -> None:
        """What a turn of the executor's loop brought, or its report."""
        self.loop.run(self.links[session].take_in, response)

    def wants_report(self, executor_id: str) -> bool:
        """Whether this router relays the executor's reports, or would if others do not."""
        return self.dispatcher._writer._reports.wants(executor_id, self.loop.time())


class _Ledger(RedisLedger):
    """The store of a router, which notes when it asks for requests to be admitted."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked_us: dict[str, int] = {}

    async def _call(self, operation: Any, name: str, args: Sequence[Argument]) -> Reply:
        if name == "submit":
            now_us = round(asyncio.get_running_loop().time() * US_PER_S)
            self.asked_us.update(dict.fromkeys(operation.own_ids, now_us))
        return await super()._call(operation, name, args)


def _raise(error: Exception) -> None:
    raise error
