"""Builds our C++ libraries at first use and loads them.

A library has a plain C interface, so it compiles in seconds without torch's headers. It is kept in the disk cache under
a digest of everything that decides its code: sources, flags, compiler and this machine's processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from common.disk_cache import build_once, cache_folder

COMPILERS = ("g++", "c++", "clang++")
# -Wno-psabi: vectors wider than the machine's are only passed between functions that are inlined.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-pthread", "-Wno-psabi")
TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class BuildFailure:
    """Why there is no library, in words."""

    reason: str


def load_library(
    name: str, sources: Sequence[Path], headers: Sequence[Path] = (), flags: Sequence[str] = ()
) -> ctypes.CDLL | BuildFailure:
    """The library, compiled if this machine has not done so before; `flags` come after `FLAGS`."""
    compiler = _find_compiler()
    if compiler is None:
        return BuildFailure("there is no C++ compiler (g++) here")
    flags = (*FLAGS, *flags)
    try:
        digest = _digest(compiler, (*sources, *headers), flags)
        library = build_once(
            cache_folder() / "kernels" / f"{name}-{digest}.so",
            lambda target: _compile(compiler, sources, flags, target),
        )
        return ctypes.CDLL(str(library))
    except subprocess.CalledProcessError as error:
        return BuildFailure(f"{compiler} failed: {_first_error(error.stderr)}")
    except subprocess.TimeoutExpired:
        return BuildFailure(f"{compiler} took longer than {TIMEOUT_S} s")
    except OSError as error:
        return BuildFailure(f"the library {name!r} cannot be built or loaded: {error}")


def _find_compiler() -> str | None:
    candidates = (os.environ.get("CXX"), *COMPILERS)
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


def _digest(compiler: str, files: Sequence[Path], flags: Sequence[str]) -> str:
    texts = (file.read_text(encoding="utf-8") for file in files)
    parts = (*texts, *flags, _run([compiler, "--version"]), _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(compiler: str, sources: Sequence[Path], flags: Sequence[str], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    compiled = [str(target.with_name(f"{source.stem}.o")) for source in sources]
    commands = [[compiler, *flags, "-c", str(source), "-o", to] for source, to in zip(sources, compiled, strict=True)]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(_run, commands))
    _run([compiler, *flags, "-shared", *compiled, "-o", str(target)])


def _processor() -> str:
    """Model and instruction sets; a cache folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _run(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout


def _first_error(text: str) -> str:
    errors = [line for line in text.splitlines() if "error" in line] or text.splitlines()
    return errors[0].strip() if errors else "no output"
