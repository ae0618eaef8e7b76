"""The builds of our C++ code that tests compare: those that this processor can run."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.executor.native.build import BuildFailure, load_library
from inflight.executor.native.library import (
    FOLDER,
    NativeLibrary,
    load_native,
    usable_instruction_sets,
)

SOURCES = Path(__file__).parent
INSTRUCTION_SETS = [instructions.name for instructions in usable_instruction_sets()]
# Of libraries that only tests use: most of the time of these tests would be the compiler's.
QUICKLY_COMPILED = "-O1"
# For tests of a whole model: the fast tier has only the best build.
BEST_FIRST = [INSTRUCTION_SETS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in INSTRUCTION_SETS[1:])]


def library_of(instructions: str) -> NativeLibrary:
    """The library built for an instruction set that this processor has."""
    library = load_native(instructions)
    assert isinstance(library, NativeLibrary), library
    return library


def emulation_of_amx(*flags: str) -> NativeLibrary:
    """Products and attention of the build for AMX with emulated tiles, for any processor of x86-64, or for one with the
    instructions of `flags`."""
    headers = sorted(
        (*FOLDER.glob("*.h"), FOLDER / "attention.cpp", FOLDER / "pool.cpp", SOURCES / "coded_products.cpp")
    )
    flags = ("-march=x86-64", QUICKLY_COMPILED, f"-I{FOLDER}", *flags)
    calls = load_library("emulated_tiles", (SOURCES / "emulated_tiles.cpp",), headers, flags)
    assert not isinstance(calls, BuildFailure), calls
    return NativeLibrary(calls, "amx, emulated")
