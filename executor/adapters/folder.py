"""The folder that adapters are served from: each sub-folder with the files of an adapter is one, named by the folder.

An adapter is read when its files appear or change. One that cannot be served is logged once and left out. While the
folder itself cannot be read, its adapters stay known.
"""

from __future__ import annotations

import logging
import re
import threading
from dataclasses import dataclass
from pathlib import Path

from inflight.common.followed import FileVersion, version_of
from inflight.executor.adapters.errors import AdapterError, AdapterGoneError
from inflight.executor.adapters.peft_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    parse,
    read_files,
)
from inflight.executor.adapters.weights import AdapterLimits, AdapterWeights, RankLimit

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
Versions = tuple[FileVersion | None, ...]


@dataclass(frozen=True, slots=True)
class KnownAdapter:
    """An adapter in the folder, whose files were whole and right when they were read."""

    name: str
    hash: str
    rank: int
    folder: Path


class AdapterFolder:
    """The adapters for one model. `look` and `read` may be slow, and may be called on any thread."""

    def __init__(self, folder: Path, limits: AdapterLimits | RankLimit) -> None:
        self._folder = folder
        self._limits = limits
        self._known: dict[str, tuple[Versions, KnownAdapter | None]] = {}
        self._is_readable = True
        self._turn = threading.Lock()

    def look(self) -> tuple[KnownAdapter, ...]:
        """Reads what is new or has changed, and returns all adapters by name."""
        with self._turn:
            return self._look()

    def _look(self) -> tuple[KnownAdapter, ...]:
        try:
            folders = sorted(path for path in self._folder.iterdir() if (path / CONFIG_FILE).is_file())
        except OSError as error:
            if self._is_readable:
                log.warning("the adapter folder cannot be read: %s", error)
            self._is_readable = False
        else:
            self._is_readable = True
            self._known = {path.name: self._look_at(path) for path in folders if not path.name.startswith(".")}
        return tuple(adapter for _, adapter in self._known.values() if adapter is not None)

    def read(self, adapter: KnownAdapter) -> AdapterWeights:
        """Reads the weights of an adapter. Raises `AdapterError`, an `AdapterGoneError` if its files have changed."""
        return self._read(adapter.folder, adapter.hash, AdapterGoneError("its files have changed"))

    def read_same(self, name: str, adapter_hash: str) -> AdapterWeights:
        """Reads the weights of an adapter that another process has chosen. Raises `AdapterError`, also if its files are
        not the same here."""
        return self._read(self._folder / name, adapter_hash, AdapterError("its files differ from those of the leader"))

    def _read(self, folder: Path, adapter_hash: str, difference: AdapterError) -> AdapterWeights:
        files = read_files(folder)
        if files.hash != adapter_hash:
            raise difference
        return parse(files, self._limits)

    def _look_at(self, folder: Path) -> tuple[Versions, KnownAdapter | None]:
        versions = _versions_of(folder)
        known = self._known.get(folder.name)
        if known is not None and known[0] == versions:
            return known
        adapter = self._examine(folder)
        if _versions_of(folder) != versions:
            # One file may be of the old adapter and one of the new. The next look reads both.
            return known or ((), None)
        return versions, adapter

    def _examine(self, folder: Path) -> KnownAdapter | None:
        try:
            if not NAME.fullmatch(folder.name):
                raise AdapterError("its name may have letters, digits, '.', '_' and '-', and at most 128 of them")
            files = read_files(folder)
            adapter = KnownAdapter(folder.name, files.hash, parse(files, self._limits).rank, folder)
        except AdapterError as error:
            log.warning("adapter %r is left out: %s", folder.name, error)
            return None
        log.info("adapter %s of rank %d: %s", adapter.name, adapter.rank, adapter.hash)
        return adapter


def _versions_of(folder: Path) -> Versions:
    return tuple(version_of(folder / name) for name in (CONFIG_FILE, WEIGHTS_FILE))
