"""Builds the CPU kernels at first use and loads them.

The library has a plain C interface, so it compiles in seconds without torch's headers. It is kept in the disk cache
under a digest of everything that decides its code: source, flags, compiler and this machine's processor.

The kernels run on OpenMP threads, and so does torch. Two OpenMP runtimes in a process mean two thread pools that
fight for the cores, so the library is linked against the one that torch carries.
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

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
COMPILERS = ("g++", "c++", "clang++")
# -Wno-psabi: vectors wider than the machine's are only passed between functions that are inlined.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-Wno-psabi")
PLAIN_FLAG = "-DINFLIGHT_PLAIN"
TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class BuildFailure:
    """Why there are no kernels, in words."""

    reason: str


def load_kernels(extra_flags: Sequence[str] = ()) -> ctypes.CDLL | BuildFailure:
    """The kernels, compiled if this machine has not done so before."""
    compiler = _find_compiler()
    if compiler is None:
        return BuildFailure("there is no C++ compiler (g++) here")
    flags = (*FLAGS, *extra_flags)
    try:
        digest = _digest(compiler, flags)
        library = build_once(
            cache_folder() / "kernels" / f"attention-{digest}.so", lambda target: _compile(compiler, flags, target)
        )
        return ctypes.CDLL(str(library))
    except subprocess.CalledProcessError as error:
        return BuildFailure(f"{compiler} failed: {_last_line(error.stderr)}")
    except subprocess.TimeoutExpired:
        return BuildFailure(f"{compiler} took longer than {TIMEOUT_S} s")
    except OSError as error:
        return BuildFailure(f"the kernels cannot be built or loaded: {error}")


def _find_compiler() -> str | None:
    candidates = (os.environ.get("CXX"), *COMPILERS)
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


def _digest(compiler: str, flags: Sequence[str]) -> str:
    parts = (SOURCE.read_text(), *flags, _run([compiler, "--version"]), _processor(), str(_torch_openmp()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(compiler: str, flags: Sequence[str], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    compiled = target.with_suffix(".o")
    _run([compiler, *flags, "-c", str(SOURCE), "-o", str(compiled)])
    openmp = _torch_openmp()
    runtime = ["-fopenmp"] if openmp is None else [str(openmp), f"-Wl,-rpath,{openmp.parent}"]
    _run([compiler, "-shared", str(compiled), *runtime, "-o", str(target)])


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


def _last_line(text: str) -> str:
    errors = [line for line in text.splitlines() if "error" in line] or text.splitlines()
    return errors[0].strip() if errors else "no output"
