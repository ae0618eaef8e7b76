"""Resources of the machine that this process may use: cores, memory and file descriptors.

Cores and memory are those that the control groups of this process leave, version 1 and 2: of its container, of its
systemd unit and of all groups around it that can be seen. A group's limits are in its files; `/proc/self/cgroup` names
the group, `/proc/self/mountinfo` says where its hierarchy is mounted, and which part of it.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

ROOT = Path("/")

# The kernel's own limit by default. Containers often have no other, or one of a billion.
MAX_OPEN_FILES = 1024 * 1024
# Descriptors for everything but connections of clients: libraries, logs, Redis, links, files that are read again.
RESERVED_FILES = 128


def raise_open_files_limit() -> None:
    """Raises the soft limit of file descriptors to the hard one. Shells and systemd set 1024, for programs that use
    `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a sandbox that forbids it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_client_connections() -> int:
    """Returns the connections of clients for which there are file descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else max(1, soft - RESERVED_FILES)


def num_usable_cores(root: Path = ROOT) -> int:
    """Returns the cores that this process may run on: its affinity, and the CPU quotas of its control groups. At least
    1. The files of the system are below `root`."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for group in _groups(root, "cpu") if (quota := _quota(group)) is not None]
    return max(1, min(num_cores, *map(math.ceil, quotas)) if quotas else num_cores)


def num_available_memory_bytes(root: Path = ROOT) -> int | None:
    """Returns the bytes that can still be allocated without swapping; None if the system does not report them. The
    files of the system are below `root`."""
    free = [_available_on_host(root / "proc/meminfo"), *map(_available_in, _groups(root, "memory"))]
    return min((num_bytes for num_bytes in free if num_bytes is not None), default=None)


def return_free_memory() -> None:
    """Returns memory that the C library keeps for later allocations to the system. Does nothing where it is not glibc.

    After loading a quantized model this can be half the size of its weights.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _available_on_host(meminfo: Path) -> int | None:
    for line in _read(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yields the folders of this process's groups in the hierarchy of the controller and in that of version 2, the
    innermost first."""
    paths = dict(_memberships(root))
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount, _, source = line.partition(" - ")
        if not source.startswith("cgroup"):
            continue
        (_, _, _, shown, mount_point, *_), (kind, _, options) = mount.split(" "), source.split(" ", 2)
        if kind == "cgroup2":
            path = paths.get("")
        elif kind == "cgroup" and controller in options.split(","):
            path = paths.get(controller)
        else:
            continue
        folder = root / _unescaped(mount_point).lstrip("/")
        for name in _names_below(PurePosixPath(path or "/"), PurePosixPath(_unescaped(shown))):
            yield folder / name


def _memberships(root: Path) -> Iterator[tuple[str, str]]:
    """Yields the controllers and the path of this process's group for each; the controller of version 2 is ''."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _names_below(path: PurePosixPath, shown: PurePosixPath) -> Iterator[PurePosixPath]:
    """Yields the group and those around it, relative to the part of the hierarchy that is mounted. A container may see
    only its own group, under a path that means something else to it."""
    if ".." not in path.parts and path.is_relative_to(shown):
        name = path.relative_to(shown)
        yield from (name, *name.parents)
    else:
        yield PurePosixPath()


def _available_in(group: Path) -> int | None:
    """Returns the bytes that a group can still take. Inactive pages of files are not in use: the kernel drops them
    first. A group of version 1 also lists the least limit of the groups around it."""
    stat = dict(line.partition(" ")[::2] for line in _read(group / "memory.stat").splitlines())
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    limits = [*(_read(group / name) for name in names), stat.get("hierarchical_memory_limit", "")]
    used = _read(group / "memory.current") or _read(group / "memory.usage_in_bytes")
    limit = min((int(limit) for limit in limits if limit.isdigit()), default=None)
    if limit is None or not used.isdigit():
        return None
    # In version 1 those without `total_` leave out the groups within.
    inactive = stat.get("total_inactive_file", stat.get("inactive_file", "0"))
    return max(0, limit - max(0, int(used) - int(inactive)))


def _quota(group: Path) -> float | None:
    """Returns the cores that a group may use at a time; None: any."""
    quota, _, period = _read(group / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _unescaped(path: str) -> str:
    """Returns a path of mountinfo, which has blanks and the like as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
