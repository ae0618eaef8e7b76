"""The builds of our C++ libraries that tests compare: this processor's, and those that other processors get."""

from __future__ import annotations

import platform
from pathlib import Path

from executor.native.build import PLAIN_FLAG
from executor.native.library import NativeLibrary, load_native, usable_instruction_sets

_IS_X86 = platform.machine() == "x86_64"
_HAS_AVX2 = _IS_X86 and " avx2 " in Path("/proc/cpuinfo").read_text()

# Flags after the usual ones, of which the last -march counts. `plain` has no instruction of a particular processor in
# its source; the compiler still chooses those of the oldest one.
BUILDS: dict[str, tuple[str, ...]] = {
    "native": (),
    **({"avx2": ("-march=haswell",)} if _HAS_AVX2 else {}),
    **({"sse2": ("-march=x86-64",)} if _IS_X86 else {}),
    "plain": (PLAIN_FLAG, "-march=x86-64") if _IS_X86 else (PLAIN_FLAG,),
}

INSTRUCTION_SETS = [instructions.name for instructions in usable_instruction_sets()]


def library_of(instructions: str) -> NativeLibrary:
    """The library built for an instruction set that this processor has."""
    library = load_native(instructions)
    assert isinstance(library, NativeLibrary), library
    return library
