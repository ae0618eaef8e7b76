"""Build and loading of the C++ libraries at first use.

A library has a plain C interface, so it compiles in seconds without torch's headers. It is kept in the disk cache under
a digest of everything that determines its code: sources, flags, compiler and this machine's processor.

A container image has no compiler. It contains libraries that were built with it (`python -m
inflight.executor.native.prebuild`) in the folder `INFLIGHT_KERNELS_DIR`, under a digest of sources and flags, which
name the instructions explicitly.
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

from inflight.common.disk_cache import build_once, cache_folder

PREBUILT_VARIABLE = "INFLIGHT_KERNELS_DIR"
COMPILERS = ("g++", "c++", "clang++")
# -Wno-psabi: vectors wider than the machine's are only passed between functions that are inlined.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-pthread", "-Wno-psabi")
# Of a build at first use, which a process waits for. An image's build has none: a busy machine may take longer.
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class BuildFailure:
    """The reason why there is no library."""

    reason: str


def load_library(
    name: str, sources: Sequence[Path], headers: Sequence[Path] = (), flags: Sequence[str] = ()
) -> ctypes.CDLL | BuildFailure:
    """Loads the library, compiling it if it was not built before. `flags` come after `FLAGS`."""
    prebuilt = _prebuilt(name, (*sources, *headers), flags)
    if prebuilt is not None and prebuilt.exists():
        try:
            return ctypes.CDLL(str(prebuilt))
        except OSError as error:
            return BuildFailure(f"{prebuilt} cannot be loaded: {error}")
    compiler = _find_compiler()
    if compiler is None:
        return BuildFailure("no C++ compiler (g++) was found")
    flags = (*FLAGS, *flags)
    try:
        digest = _digest(compiler, (*sources, *headers), flags)
        library = build_once(
            cache_folder() / "kernels" / f"{name}-{digest}.so",
            lambda target: _compile(compiler, sources, flags, target, TIMEOUT_S),
        )
        return ctypes.CDLL(str(library))
    except subprocess.CalledProcessError as error:
        return BuildFailure(f"{compiler} failed: {_first_error(error.stderr)}")
    except subprocess.TimeoutExpired:
        return BuildFailure(f"{compiler} took longer than {TIMEOUT_S:.0f} s")
    except OSError as error:
        return BuildFailure(f"the library {name!r} cannot be built or loaded: {error}")


def prebuild(folder: Path, name: str, sources: Sequence[Path], headers: Sequence[Path], flags: Sequence[str]) -> Path:
    """Builds a library into `folder`, for any machine with the instructions that `flags` name.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be built.
    """
    compiler = _find_compiler()
    if compiler is None:
        raise FileNotFoundError("no C++ compiler (g++) was found")
    target = folder / _prebuilt_name(name, (*sources, *headers), flags)
    _compile(compiler, sources, (*(flag for flag in FLAGS if flag != "-march=native"), *flags), target, None)
    for left in folder.glob("*.o"):
        left.unlink()
    return target


def _prebuilt(name: str, files: Sequence[Path], flags: Sequence[str]) -> Path | None:
    folder = os.environ.get(PREBUILT_VARIABLE)
    return Path(folder) / _prebuilt_name(name, files, flags) if folder else None


def _prebuilt_name(name: str, files: Sequence[Path], flags: Sequence[str]) -> str:
    texts = (file.read_text(encoding="utf-8") for file in files)
    return f"{name}-{hashlib.sha256(chr(0).join((*texts, *flags)).encode()).hexdigest()[:16]}.so"


def _find_compiler() -> str | None:
    candidates = (os.environ.get("CXX"), *COMPILERS)
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


def _digest(compiler: str, files: Sequence[Path], flags: Sequence[str]) -> str:
    texts = (file.read_text(encoding="utf-8") for file in files)
    parts = (*texts, *flags, _run([compiler, "--version"]), _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(
    compiler: str, sources: Sequence[Path], flags: Sequence[str], target: Path, timeout_s: float | None
) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    compiled = [str(target.with_name(f"{source.stem}.o")) for source in sources]
    commands = [[compiler, *flags, "-c", str(source), "-o", to] for source, to in zip(sources, compiled, strict=True)]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda command: _run(command, timeout_s), commands))
    _run([compiler, *flags, "-shared", *compiled, "-o", str(target)], timeout_s)


def _processor() -> str:
    """Returns model and instruction sets, since different machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _run(command: Sequence[str], timeout_s: float | None = TIMEOUT_S) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_s).stdout


def _first_error(text: str) -> str:
    errors = [line for line in text.splitlines() if "error" in line] or text.splitlines()
    return errors[0].strip() if errors else "no output"
