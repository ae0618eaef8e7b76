"""The builds of our C++ code that tests compare: those that this processor can run."""

from __future__ import annotations

import pytest

from executor.native.library import NativeLibrary, load_native, usable_instruction_sets

INSTRUCTION_SETS = [instructions.name for instructions in usable_instruction_sets()]
# For tests of a whole model: the fast tier has only the best build.
BEST_FIRST = [INSTRUCTION_SETS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in INSTRUCTION_SETS[1:])]


def library_of(instructions: str) -> NativeLibrary:
    """The library built for an instruction set that this processor has."""
    library = load_native(instructions)
    assert isinstance(library, NativeLibrary), library
    return library
