"""Resources of the machine that this process may use: cores and memory, including the limits of its container, and file
descriptors."""

from __future__ import annotations

import ctypes
import math
import os
import resource
from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")

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


def num_usable_cores(cgroup: Path = CGROUP) -> int:
    """Returns the cores that this process may run on: its affinity, and the CPU quota of its control group. At least
    1."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        num_cores = min(num_cores, math.ceil(int(quota) / int(period)))
    return max(1, num_cores)


def num_available_memory_bytes(cgroup: Path = CGROUP, meminfo: Path = MEMINFO) -> int | None:
    """Returns the bytes that can still be allocated without swapping; None if the system does not report them."""
    limits = [value for value in (_available_on_host(meminfo), _available_in_cgroup(cgroup)) if value is not None]
    return min(limits, default=None)


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


def _available_in_cgroup(cgroup: Path) -> int | None:
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    if not (limit.isdigit() and used.isdigit()):
        return None
    return max(0, int(limit) - int(used))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
