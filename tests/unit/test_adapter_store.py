"""Adapter slots: held at most once per adapter, given on only when no step uses them, and never lost."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from pathlib import Path

import pytest

from inflight.executor.adapters.errors import AdapterGoneError, NoSlotError, UnknownAdapterError
from inflight.executor.adapters.folder import AdapterFolder, KnownAdapter
from inflight.executor.adapters.peft_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterFiles,
    read_files,
)
from inflight.executor.adapters.store import AdapterStore
from inflight.executor.adapters.weights import AdapterWeights
from inflight.executor.scheduler.sequence import Sequence
from tests.support.checkpoints.adapter_files import LIMITS, save_adapter
from tests.support.scheduler.scheduling import make_sequence

NUM_SLOTS = 2
NAMES = ("a", "b", "c", "d")


class Slots:
    """What `load` has put into the slots."""

    def __init__(self) -> None:
        self.content: dict[int, AdapterWeights] = {}
        self.loads: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def load(self, slot: int, adapter: KnownAdapter, weights: AdapterWeights) -> None:
        assert self.gate.wait(60)
        self.content[slot] = weights
        self.loads.append(slot)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        save_adapter(made / name, seed)
    return made


@pytest.fixture
def slots() -> Slots:
    return Slots()


@pytest.fixture
def store(folder: Path, slots: Slots) -> AdapterStore:
    return AdapterStore(AdapterFolder(folder, LIMITS), NUM_SLOTS, slots.load)


def hash_of(store: AdapterStore, name: str) -> str:
    return next(state.hash for state in store.states() if state.name == name)


def holder(store: AdapterStore, name: str) -> Sequence:
    sequence = make_sequence(name, [1])
    sequence.adapter_hash = bytes.fromhex(hash_of(store, name))
    store.hold(sequence)
    return sequence


def resident(store: AdapterStore) -> set[str]:
    return {state.name for state in store.states() if state.is_resident}


async def loaded(store: AdapterStore, name: str) -> Sequence:
    sequence = holder(store, name)
    if sequence.adapter_slot is None:
        await store.load(sequence)
    return sequence


async def test_sequences_share_a_slot_and_the_idle_adapter_used_longest_ago_leaves(
    store: AdapterStore, slots: Slots
) -> None:
    first, twin = holder(store, "a"), holder(store, "a")
    await asyncio.gather(store.load(first), store.load(twin))
    assert first.adapter_slot == twin.adapter_slot is not None
    other = await loaded(store, "b")
    assert len(slots.loads) == 2

    # Both are held, so there is no slot for a third until all sequences of one have ended
    store.release([first])
    with pytest.raises(NoSlotError):
        holder(store, "c")
    store.release([other])
    store.release([twin])
    third = await loaded(store, "c")
    assert resident(store) == {"a", "c"}
    store.release([third])


async def test_slot_is_given_on_only_when_no_step_in_flight_has_a_row_of_it(store: AdapterStore, slots: Slots) -> None:
    first, second = await loaded(store, "a"), await loaded(store, "b")
    first.num_in_flight = 1
    store.release([first])

    # The next one may be submitted, and waits
    third = holder(store, "c")
    loading = asyncio.create_task(store.load(third))
    store.release([])
    for _ in range(10):
        await asyncio.sleep(0)
    assert not loading.done()
    assert len(slots.loads) == 2
    assert resident(store) == {"a", "b"}

    first.num_in_flight = 0
    store.release([])
    await loading
    assert third.adapter_slot == first.adapter_slot != second.adapter_slot
    assert resident(store) == {"b", "c"}


async def test_unknown_adapter_is_refused_and_replaced_one_stays_for_those_that_use_it(
    tmp_path: Path, slots: Slots
) -> None:
    save_adapter(tmp_path / "a", seed=1)
    store = AdapterStore(AdapterFolder(tmp_path, LIMITS), NUM_SLOTS, slots.load)
    changes: list[int] = []
    store.on_change = lambda: changes.append(1)
    first = await loaded(store, "a")
    old_hash = hash_of(store, "a")
    save_adapter(tmp_path / "a", seed=2)
    store.look()
    assert hash_of(store, "a") != old_hash
    assert len(changes) == 2

    # Those that name the old content still get it, those that name the new one get that
    again = make_sequence("again", [1])
    again.adapter_hash = first.adapter_hash
    store.hold(again)
    assert again.adapter_slot == first.adapter_slot
    assert (await loaded(store, "a")).adapter_slot != first.adapter_slot
    unknown = make_sequence("unknown", [1])
    unknown.adapter_hash = bytes(32)
    with pytest.raises(UnknownAdapterError):
        store.hold(unknown)


async def test_failed_load_is_told_to_all_that_wait_and_leaves_the_slot_free(tmp_path: Path, slots: Slots) -> None:
    save_adapter(tmp_path / "a")
    save_adapter(tmp_path / "b", seed=1)
    store = AdapterStore(AdapterFolder(tmp_path, LIMITS), 1, slots.load)
    first, twin = holder(store, "a"), holder(store, "a")
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    results = await asyncio.gather(store.load(first), store.load(twin), return_exceptions=True)
    assert [type(result) for result in results] == [AdapterGoneError] * 2
    assert "adapter a cannot be loaded: its files cannot be read" in str(results[0])
    store.release([first, twin])
    assert [state.name for state in store.states()] == ["b"]
    assert (await loaded(store, "b")).adapter_slot == 0


async def test_files_that_change_for_a_moment_send_their_requests_back(
    tmp_path: Path, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_adapter(tmp_path / "a")
    folder = AdapterFolder(tmp_path, LIMITS)
    store = AdapterStore(folder, 1, slots.load)
    first = holder(store, "a")
    read = folder.read

    def read_others(adapter: KnownAdapter) -> AdapterWeights:
        save_adapter(tmp_path / "a", seed=1)
        try:
            return read(adapter)
        finally:
            save_adapter(tmp_path / "a")

    monkeypatch.setattr(folder, "read", read_others)
    with pytest.raises(AdapterGoneError, match="its files have changed"):
        await store.load(first)
    store.release([first])
    monkeypatch.undo()
    assert (await loaded(store, "a")).adapter_slot == 0


async def test_files_that_change_while_they_are_read_are_never_combined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is a link; it is redirected after the configuration has been read and before the weights are."""
    old, new = save_adapter(tmp_path / "old", 1), save_adapter(tmp_path / "new", 2, lora_alpha=16)
    (tmp_path / "served").mkdir()
    link = tmp_path / "served" / "a"
    link.symlink_to(old)
    folder = AdapterFolder(tmp_path / "served", LIMITS)

    def redirected_between(path: Path) -> AdapterFiles:
        config = (path / CONFIG_FILE).read_bytes()
        (tmp_path / "next").symlink_to(new)
        (tmp_path / "next").replace(link)
        return AdapterFiles(config, (path / WEIGHTS_FILE).read_bytes())

    with monkeypatch.context() as during:
        during.setattr("inflight.executor.adapters.folder.read_files", redirected_between)
        assert folder.look() == ()
    assert [one.hash for one in folder.look()] == [read_files(new).hash]

    # One that is known stays until both files of the other have been read
    new, old = old, new
    save_adapter(new, 3, lora_alpha=32)
    (known,) = folder.look()
    with monkeypatch.context() as during:
        during.setattr("inflight.executor.adapters.folder.read_files", redirected_between)
        os.utime(old / CONFIG_FILE, (1, 1))
        assert folder.look() == (known,)
    assert [one.hash for one in folder.look()] == [read_files(new).hash]


async def test_storm_of_loads_and_ends_leaks_no_slot(store: AdapterStore, slots: Slots) -> None:
    random_choices = random.Random(0)
    held: list[Sequence] = []
    pending: list[asyncio.Task[None]] = []
    for _ in range(300):
        name = random_choices.choice(NAMES)
        try:
            sequence = holder(store, name)
        except NoSlotError:
            assert len({one.adapter_hash for one in held}) == NUM_SLOTS
        else:
            held.append(sequence)
            if sequence.adapter_slot is None:
                pending.append(asyncio.create_task(store.load(sequence)))
        if random_choices.random() < 0.3:
            await asyncio.sleep(0)
        if random_choices.random() < 0.2:
            # Sequences that are held and loaded have the weights of their adapter in their slot
            await asyncio.gather(*pending, return_exceptions=True)
            pending.clear()
            slots_of = {one.adapter_hash: one.adapter_slot for one in held}
            assert None not in slots_of.values()
            assert len(set(slots_of.values())) == len(slots_of)
        while held and random_choices.random() < 0.55:
            store.release([held.pop(random_choices.randrange(len(held)))])
    store.release(held)
    await asyncio.gather(*pending, return_exceptions=True)

    # Afterwards every slot can be had again
    again = [await loaded(store, name) for name in NAMES[:NUM_SLOTS]]
    assert {one.adapter_slot for one in again} == set(range(NUM_SLOTS))
    assert len(resident(store)) == NUM_SLOTS


async def test_use_counts_sequences_and_loads_by_adapter(store: AdapterStore) -> None:
    first = await loaded(store, "a")
    await loaded(store, "a")
    store.release([first])
    await loaded(store, "b")
    assert [(use.name, use.is_resident, use.num_sequences, use.num_loads) for use in store.uses()] == [
        ("a", True, 1, 1), ("b", True, 1, 1), ("c", False, 0, 0), ("d", False, 0, 0),
    ]  # fmt: skip
    assert store.load_s > 0
