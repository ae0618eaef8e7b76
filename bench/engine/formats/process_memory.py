"""The resident memory of this process, as Linux reports it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def memory_bytes(field: Literal["VmHWM", "VmRSS"]) -> int:
    """Returns the largest resident memory so far (`VmHWM`), or the present one (`VmRSS`)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
