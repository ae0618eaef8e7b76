"""The C++ library for CPUs, built for the best instructions of the processor, or for lesser ones on request.

The build is chosen when a process starts, from what the system reports of the processor: a cache folder or an image may
have been made on another machine.
"""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass
from pathlib import Path

from inflight.executor.native.build import BuildFailure, load_library, prebuild

NAME = "kernels"
FOLDER = Path(__file__).parent
SOURCES = tuple(FOLDER / name for name in ("decoder.cpp", "attention.cpp", "sampler.cpp", "pool.cpp", "trial.cpp"))
# Without vector code, so it has one build; it changes rarely and compiles in a second, also where the device is a GPU.
AUTOMATON_SOURCES = (FOLDER / "automaton.cpp",)
CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """A build: the processor flags that it needs, as Linux spells them, and the compiler's flags."""

    name: str
    needs: frozenset[str]
    compiler_flags: tuple[str, ...]


_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}
_AMX = _BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")

# Calls within the library are bound directly, which lets the compiler inline them, and two builds that are loaded at
# once share nothing.
COMMON_FLAGS = ("-fno-semantic-interposition", "-fno-gnu-unique", "-Wl,-Bsymbolic", "-Wno-maybe-uninitialized")

# The best first.
INSTRUCTION_SETS = (
    InstructionSet("amx", _AMX, (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8")),
    InstructionSet("avx512_bf16", _BF16, _BF16_FLAGS),
    InstructionSet("avx512", _V4, ("-march=x86-64-v4",)),
    InstructionSet("avx2", _V3, ("-march=x86-64-v3",)),
    InstructionSet("plain", frozenset(), ("-march=x86-64",)),
)
# Processors other than x86-64 have one build, for themselves.
NATIVE = InstructionSet("native", frozenset(), ())
AUTOMATON_FLAGS = (*INSTRUCTION_SETS[-1].compiler_flags, *COMMON_FLAGS)
NAMES = ("auto", *(instructions.name for instructions in INSTRUCTION_SETS), NATIVE.name)


@dataclass(frozen=True, slots=True, eq=False)
class NativeLibrary:
    """The loaded build and the name of its instruction set."""

    calls: ctypes.CDLL
    instructions: str


def usable_instruction_sets(cpuinfo: Path = CPUINFO) -> tuple[InstructionSet, ...]:
    """Returns the instruction sets of this processor, the best first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return (NATIVE,)
    flags = _processor_flags(cpuinfo)
    return tuple(instructions for instructions in INSTRUCTION_SETS if instructions.needs <= flags)


def load_native(name: str = "auto") -> NativeLibrary | BuildFailure:
    """Loads the named build, or with `auto` the best one that runs here. Compiles it if necessary."""
    usable = usable_instruction_sets()
    chosen = [instructions for instructions in usable if name in ("auto", instructions.name)]
    if not chosen:
        names = ", ".join(instructions.name for instructions in usable)
        return BuildFailure(f"this processor has no {name}; it has {names}")
    failure: BuildFailure | None = None
    for instructions in chosen:
        library = _load(instructions)
        if isinstance(library, NativeLibrary):
            return library
        failure = failure or library
    assert failure is not None
    return failure


def load_automaton() -> ctypes.CDLL | BuildFailure:
    """Loads the suffix automaton, which drafts tokens. Compiles it if necessary."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return load_library("automaton", AUTOMATON_SOURCES, (), AUTOMATON_FLAGS if is_x86 else COMMON_FLAGS)


def prebuild_all(folder: Path) -> list[Path]:
    """Builds for every instruction set of x86-64 into `folder`; see `inflight.executor.native.build`."""
    folder.mkdir(parents=True, exist_ok=True)
    headers = sorted(FOLDER.glob("*.h"))
    return [
        *(
            prebuild(folder, NAME, SOURCES, headers, (*instructions.compiler_flags, *COMMON_FLAGS))
            for instructions in INSTRUCTION_SETS
        ),
        prebuild(folder, "automaton", AUTOMATON_SOURCES, (), AUTOMATON_FLAGS),
    ]


def _load(instructions: InstructionSet) -> NativeLibrary | BuildFailure:
    headers = sorted(FOLDER.glob("*.h"))
    calls = load_library(NAME, SOURCES, headers, (*instructions.compiler_flags, *COMMON_FLAGS))
    if isinstance(calls, BuildFailure):
        return calls
    if not calls.inflight_prepare():
        return BuildFailure(f"the system does not let this process use {instructions.name}")
    return NativeLibrary(calls, instructions.name)


def _processor_flags(cpuinfo: Path) -> frozenset[str]:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset())
