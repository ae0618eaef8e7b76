"""Builds our C++ libraries at first use and loads them.

A library has a plain C interface, so it compiles in seconds without torch's headers. It is kept in the disk cache under
a digest of everything that decides its code: sources, flags, compiler and this machine's processor.

A library that runs on OpenMP threads shares the process with torch, which does so too. Two OpenMP runtimes mean two
thread pools that fight for the cores, so it is linked against the one that torch carries.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.disk_cache import build_once, cache_folder

COMPILERS = ("g++", "c++", "clang++")
# -Wno-psabi: vectors wider than the machine's are only passed between functions that are inlined.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-pthread", "-Wno-psabi")
OPENMP_FLAG = "-fopenmp"
# For tests: without the instructions that only some processors have.
PLAIN_FLAG = "-DINFLIGHT_PLAIN"
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
    parts = (*texts, *flags, _run([compiler, "--version"]), _processor(), str(_torch_openmp()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(compiler: str, sources: Sequence[Path], flags: Sequence[str], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    compiled = [str(target.with_name(f"{source.stem}.o")) for source in sources]
    for source, to in zip(sources, compiled, strict=True):
        _run([compiler, *flags, "-c", str(source), "-o", to])
    _run([compiler, "-shared", *compiled, *_runtimes(flags), "-o", str(target)])


def _runtimes(flags: Sequence[str]) -> Sequence[str]:
    """What the library is linked against."""
    openmp = _torch_openmp()
    if OPENMP_FLAG not in flags:
        return ["-pthread"]
    return ["-pthread", OPENMP_FLAG] if openmp is None else ["-pthread", str(openmp), f"-Wl,-rpath,{openmp.parent}"]


def _torch_openmp() -> Path | None:
    """The GNU OpenMP runtime inside the torch package, where there is one."""
    return next(iter(sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))), None)


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
