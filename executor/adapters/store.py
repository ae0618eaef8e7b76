"""The adapters of an executor and their slots: which are known, which are loaded, and which sequences hold them.

A sequence holds its adapter from its submit until its end. The adapters that are held at once are never more than the
slots, so an adapter that is held always gets one, if need be that of an adapter that has not been held for the longest
time. Adapters are loaded one at a time, on a thread besides the event loop's and the engine's. A slot is given to
another adapter only after the end of every sequence that held the old one, when no step has rows of it.

The content hash identifies an adapter. Files that are replaced are another adapter. Sequences that hold the old one
keep it, and others may use it as long as it is in its slot. All calls come from the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from inflight.common.followed import poll
from inflight.executor.adapters.errors import AdapterError, AdapterGoneError, NoSlotError, UnknownAdapterError
from inflight.executor.adapters.folder import AdapterFolder, KnownAdapter
from inflight.executor.adapters.weights import AdapterWeights
from inflight.executor.scheduler.sequence import Sequence

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterState:
    """An adapter as reports list it."""

    name: str
    hash: str
    rank: int
    is_resident: bool


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """Use of an adapter in the folder: the sequences that hold it now, and its loads since the start."""

    name: str
    is_resident: bool
    num_sequences: int
    num_loads: int


class AdapterStore:
    """`load(slot, adapter, weights)` puts weights into a slot; it runs on a thread of its own."""

    def __init__(
        self, folder: AdapterFolder, num_slots: int, load: Callable[[int, KnownAdapter, AdapterWeights], None]
    ) -> None:
        self.num_slots = num_slots
        # Called when the states change.
        self.on_change: Callable[[], None] = lambda: None
        self._folder = folder
        self._load_slot = load
        self._known: tuple[KnownAdapter, ...] = folder.look()
        self._free = list(range(num_slots))[::-1]
        # Slots by hash; the one whose adapter has not been held for the longest time is first.
        self._slots: dict[str, int] = {}
        self._holders: dict[str, set[Sequence]] = {}
        # Sequences that have ended and still have a row in a step in flight.
        self._leaving: list[Sequence] = []
        self._has_released = asyncio.Event()
        self._loading: dict[str, asyncio.Task[int]] = {}
        self._turn = asyncio.Lock()
        self._num_loads: Counter[str] = Counter()
        # Seconds that all loads took.
        self.load_s = 0.0

    def states(self) -> list[AdapterState]:
        """Returns all adapters in the folder."""
        return [AdapterState(one.name, one.hash, one.rank, one.hash in self._slots) for one in self._known]

    def uses(self) -> list[AdapterUse]:
        """Returns the use of all adapters in the folder."""
        return [
            AdapterUse(
                one.name, one.hash in self._slots, len(self._holders.get(one.hash, ())), self._num_loads[one.name]
            )
            for one in self._known
        ]

    @property
    def num_held(self) -> int:
        """Adapters that sequences hold, those that are no longer in the folder included."""
        return len(self._holders)

    async def follow(self) -> None:
        """Polls the folder until cancelled."""
        loop = asyncio.get_running_loop()

        def look() -> None:
            loop.call_soon_threadsafe(self._know, self._folder.look())

        await poll(look)

    def look(self) -> None:
        """Looks for adapters that came, changed or went."""
        self._know(self._folder.look())

    def hold(self, sequence: Sequence) -> None:
        """Makes a sequence hold its adapter, and sets the slot if it is loaded. Raises `UnknownAdapterError` or
        `NoSlotError`."""
        adapter_hash = sequence.adapter_hash.hex()
        if adapter_hash not in self._slots and self._find(adapter_hash) is None:
            raise UnknownAdapterError
        if adapter_hash not in self._holders and len(self._holders) == self.num_slots:
            raise NoSlotError
        self._holders.setdefault(adapter_hash, set()).add(sequence)
        sequence.adapter_slot = self._slots.get(adapter_hash)

    def release(self, ended: Iterable[Sequence]) -> None:
        """Releases the adapters of sequences that have ended; those without one are ignored. Call it after every step:
        the slot of a sequence that had a row in the next step as well is free when that step has retired."""
        for sequence in ended:
            if sequence.adapter_hash:
                self._release(sequence)
        if self._leaving:
            self._leaving = [sequence for sequence in self._leaving if sequence.num_in_flight]
            self._has_released.set()

    def _release(self, sequence: Sequence) -> None:
        adapter_hash = sequence.adapter_hash.hex()
        holders = self._holders.get(adapter_hash, set())
        holders.discard(sequence)
        self._leaving.append(sequence)
        if not holders:
            self._holders.pop(adapter_hash, None)
        if adapter_hash in self._slots:
            self._slots[adapter_hash] = self._slots.pop(adapter_hash)

    async def load(self, sequence: Sequence) -> None:
        """Loads the adapter of a sequence that holds it, and sets the slot. Raises `AdapterError`.

        It is an `AdapterGoneError` if the files were replaced or removed; the states say so by then."""
        adapter_hash = sequence.adapter_hash.hex()
        loading = self._loading.get(adapter_hash)
        if loading is None:
            loading = asyncio.create_task(self._load(adapter_hash), name=f"load adapter {adapter_hash}")
            self._loading[adapter_hash] = loading
            # Retrieved even if all waiting sequences have ended, or asyncio would log it.
            loading.add_done_callback(lambda done: done.cancelled() or done.exception())
        sequence.adapter_slot = await asyncio.shield(loading)

    async def _load(self, adapter_hash: str) -> int:
        try:
            async with self._turn:
                if adapter_hash in self._slots:
                    return self._slots[adapter_hash]
                adapter = self._find(adapter_hash)
                if adapter is None or adapter_hash not in self._holders:
                    raise AdapterGoneError(f"adapter {adapter_hash} is no longer there")
                slot = await self._take_slot()
                began = time.monotonic()
                try:
                    await asyncio.to_thread(self._fill, slot, adapter)
                except AdapterError as error:
                    self._free.append(slot)
                    self._know(await asyncio.to_thread(self._folder.look))
                    is_gone = isinstance(error, AdapterGoneError) or self._find(adapter_hash) is None
                    kind = AdapterGoneError if is_gone else AdapterError
                    raise kind(f"adapter {adapter.name} cannot be loaded: {error}") from error
                except BaseException:
                    self._free.append(slot)
                    raise
                self._slots[adapter_hash] = slot
                self._num_loads[adapter.name] += 1
                self.load_s += time.monotonic() - began
        finally:
            del self._loading[adapter_hash]
            self.on_change()
        log.info("adapter %s (%s) is in slot %d", adapter.name, adapter_hash, slot)
        return slot

    def _fill(self, slot: int, adapter: KnownAdapter) -> None:
        self._load_slot(slot, adapter, self._folder.read(adapter))

    async def _take_slot(self) -> int:
        """Takes a slot for an adapter that is held and not loaded. At most `num_slots - 1` others are held, so there is
        one, at the latest when the steps in flight have retired."""
        while not self._free:
            busy = {sequence.adapter_hash.hex() for sequence in self._leaving} | self._holders.keys()
            idle = next((adapter_hash for adapter_hash in self._slots if adapter_hash not in busy), None)
            if idle is not None:
                return self._slots.pop(idle)
            self._has_released.clear()
            await self._has_released.wait()
        return self._free.pop()

    def _know(self, known: tuple[KnownAdapter, ...]) -> None:
        if known != self._known:
            self._known = known
            self.on_change()

    def _find(self, adapter_hash: str) -> KnownAdapter | None:
        return next((one for one in self._known if one.hash == adapter_hash), None)
