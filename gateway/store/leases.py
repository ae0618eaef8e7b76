"""Leases of what gateways do in the background: one gateway drives each record, and any other can take it over.

A gateway renews its leases three times as often as they lapse, and takes records whose leases have lapsed. A gateway
that stops gives its leases back. A driver that has lost its lease is cancelled; the store refuses its writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal, Protocol

from inflight.gateway.errors import ApiError

log = logging.getLogger(__name__)

LEASE_MS = 3000
TEND_S = LEASE_MS / 3000

Taken = Literal["taken", "held", "ended", "gone"]
Work = Coroutine[Any, Any, None]


class LeaseStore(Protocol):
    """A store of records with leases. Every method raises `ApiError` 503 if it does not answer."""

    async def owner(self, record_id: str, /) -> str | None:
        """Returns the owner of a running record."""

    async def take(self, record_id: str, owner: str, /) -> Taken:
        """Becomes the owner of a running record whose lease has lapsed."""

    async def tend(self, owners: Mapping[str, str], /, *, gives_back: bool = False) -> tuple[list[str], list[str]]:
        """Renews the leases of running records by their owners, or gives them back. Returns records of anyone whose
        leases have lapsed, and those of `owners` that have another owner or none."""


class Leases:
    """The records that this gateway drives, and its watch for those that none drives."""

    def __init__(self, store: LeaseStore, go_on: Callable[[str, str], Work], max_records: int) -> None:
        """`go_on` drives a record that was taken over, as its new owner."""
        self._store = store
        self._go_on = go_on
        self._max_records = max_records
        self._gateway = secrets.token_hex(8)
        self._num_owners = 0
        self._driving: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._is_running = False

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Renews and takes leases during the block. Records that have not ended then are given back."""
        self._is_running = True
        tending = asyncio.create_task(self._tend())
        try:
            yield
        finally:
            tending.cancel()
            await asyncio.gather(tending, return_exceptions=True)
            await self.give_back()

    async def give_back(self) -> None:
        """Stops driving, so that other gateways go on at once."""
        self._is_running = False
        owners = self._owners()
        tasks = [task for _, task in self._driving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if owners:
            with contextlib.suppress(ApiError):
                await self._store.tend(owners, gives_back=True)

    def new_owner(self) -> str:
        """Returns an owner that no other lease has."""
        self._num_owners += 1
        return f"{self._gateway}.{self._num_owners}"

    def check_room(self) -> None:
        """Raises `ApiError` if this gateway drives as many records as it may."""
        if not self._has_room():
            raise ApiError(503, "too many requests are under way", "server_error", code="busy", retry_after_s=1.0)

    def drive(self, record_id: str, owner: str, work: Work) -> None:
        """Does the work of a record, as its owner. A driver that the record has here already is cancelled."""
        if (earlier := self._driving.get(record_id)) is not None:
            earlier[1].cancel()
        task = asyncio.create_task(work, name=record_id)
        self._driving[record_id] = owner, task
        task.add_done_callback(lambda done: self._ended(record_id, done))

    def _has_room(self) -> bool:
        return self._is_running and len(self._driving) < self._max_records

    def _owners(self) -> dict[str, str]:
        return {record_id: owner for record_id, (owner, _) in self._driving.items()}

    def _ended(self, record_id: str, task: asyncio.Task[None]) -> None:
        if self._driving.get(record_id, ("", None))[1] is task:
            del self._driving[record_id]

    async def _tend(self) -> None:
        while True:
            try:
                lapsed, lost = await self._store.tend(self._owners())
                for record_id in lost:
                    # A driver whose record was cancelled or deleted learns it from its next write, or here.
                    if record_id in self._driving and not await self._is_owned(record_id):
                        self._driving[record_id][1].cancel()
                for record_id in lapsed:
                    await self._take(record_id)
            except ApiError as error:
                log.debug("leases were not renewed: %s", error)
            await asyncio.sleep(TEND_S)

    async def _is_owned(self, record_id: str) -> bool:
        owner = await self._store.owner(record_id)
        # It may have ended here meanwhile.
        return record_id not in self._driving or owner == self._driving[record_id][0]

    async def _take(self, record_id: str) -> None:
        if record_id in self._driving or not self._has_room():
            return
        owner = self.new_owner()
        if await self._store.take(record_id, owner) == "taken":
            log.info("%s: taken over", record_id)
            self.drive(record_id, owner, self._go_on(record_id, owner))
