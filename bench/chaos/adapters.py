"""The LoRA adapters of a chaos run: their files, which change under load, and what a name may stand for at a time.

Each adapter has two versions with one name. Which of them a request got depends on when its router heard of a change.
From the moment at which every router lists a new version, new requests get no other.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from inflight.bench.fleet.health import Observer
from inflight.bench.fleet.random_adapters import write_adapter

NUM_VERSIONS = 2
# The routers hear of a change within a few seconds; this is a limit of liveness.
LISTED_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a name may stand for in [from_s, until_s); the version None: nothing."""

    version: int | None
    from_s: float
    until_s: float = math.inf


@dataclass(slots=True)
class AdapterHistory:
    """The meanings of each name. Pure."""

    meanings: dict[str, list[Meaning]] = field(default_factory=dict)

    def change(self, name: str, version: int | None, at_s: float) -> None:
        """Records that routers may hear of another version from now on."""
        self.meanings.setdefault(name, []).append(Meaning(version, at_s))

    def settle(self, name: str, at_s: float) -> None:
        """Records that all routers have heard of the last change."""
        *earlier, last = self.meanings[name]
        self.meanings[name] = [Meaning(one.version, one.from_s, min(one.until_s, at_s)) for one in earlier] + [last]

    def versions(self, name: str, since_s: float, until_s: float) -> frozenset[int | None]:
        """Returns what a request got that was admitted in this time."""
        return frozenset(
            one.version for one in self.meanings.get(name, ()) if one.from_s <= until_s and since_s < one.until_s
        )

    def has_changed(self, name: str, since_s: float, until_s: float) -> bool:
        """Returns whether the version that a request got may have been replaced or removed before its end."""
        return len([one for one in self.meanings.get(name, ()) if one.from_s <= until_s and since_s < one.until_s]) > 1


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The folder that executors serve, and beside it every version of each adapter. A name is a link, so that both
    files change at once."""

    served: Path
    kept: Path
    names: tuple[str, ...]

    @classmethod
    def write(cls, folder: Path, model_folder: Path, num_adapters: int) -> AdapterFiles:
        """Makes the files of all versions; every version is served under a name of its own."""
        files = cls(folder / "served", folder / "kept", tuple(f"lora-{index}" for index in range(num_adapters)))
        files.served.mkdir(parents=True)
        for index, name in enumerate(files.names):
            for version in range(NUM_VERSIONS):
                write_adapter(files.kept / version_name(name, version), model_folder, NUM_VERSIONS * index + version)
        files.serve_versions()
        return files

    def serve_versions(self) -> None:
        """Serves every version, and no adapter under its own name."""
        for path in self.kept.iterdir():
            self._link(path.name, path)

    def serve_names(self) -> None:
        """Serves the first version of each adapter under its name, and nothing else."""
        for path in self.kept.iterdir():
            self.remove(path.name)
        for name in self.names:
            self.put(name, 0)

    def put(self, name: str, version: int) -> None:
        """Replaces the files under a name."""
        self._link(name, self.kept / version_name(name, version))

    def remove(self, name: str) -> None:
        """Removes the files under a name."""
        (self.served / name).unlink()

    def truncate(self, name: str) -> None:
        """Replaces the files under a name by ones of which the weights are cut off."""
        broken = self.kept.parent / "broken"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree((self.served / name).resolve(), broken)
        weights = broken / "adapter_model.safetensors"
        os.truncate(weights, weights.stat().st_size // 2)
        self._link(name, broken)

    def _link(self, name: str, target: Path) -> None:
        new = self.served / f".{name}"
        new.symlink_to(target.resolve(), target_is_directory=True)
        new.replace(self.served / name)


@dataclass(slots=True)
class ServedAdapters:
    """The adapters of a running system. `hashes` are those of the versions by `version_name`."""

    files: AdapterFiles
    observer: Observer
    hashes: Mapping[str, str]
    history: AdapterHistory = field(default_factory=AdapterHistory)
    versions: dict[str, int] = field(default_factory=dict)
    # Held during a change: one at a time, where faults overlap.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def begin(self) -> None:
        """Serves the first version of each adapter under its name."""
        self.files.serve_names()
        for name in self.files.names:
            self.versions[name] = 0
            self.history.change(name, 0, time.monotonic())
        await self._listed()

    async def replace(self, index: int) -> None:
        """Replaces the files of an adapter by those of its other version."""
        name = self.files.names[index]
        version = (self.versions[name] + 1) % NUM_VERSIONS
        self.history.change(name, version, time.monotonic())
        self.versions[name] = version
        self.files.put(name, version)
        await self._listed()
        self.history.settle(name, time.monotonic())

    async def remove(self, index: int) -> None:
        """Removes the files of an adapter. `replace` brings its other version."""
        await self._take_away(index, self.files.remove)

    async def truncate(self, index: int) -> None:
        """Makes the files of an adapter unusable. `replace` brings its other version."""
        await self._take_away(index, self.files.truncate)

    async def _take_away(self, index: int, change: Callable[[str], None]) -> None:
        name = self.files.names[index]
        self.history.change(name, None, time.monotonic())
        change(name)
        await self._listed(without=name)
        self.history.settle(name, time.monotonic())

    async def _listed(self, without: str = "") -> None:
        """Returns when every router lists what the files are. Raises `TimeoutError`."""
        due = {
            name: self.hashes[version_name(name, version)] for name, version in self.versions.items() if name != without
        }
        await self.observer.wait_until_listed(due, LISTED_WITHIN_S)


def version_name(name: str, version: int) -> str:
    """Returns the name under which a version is served to find out what it brings."""
    return f"{name}.{version}"
