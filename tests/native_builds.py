"""The builds of our C++ code that tests compare: those that this processor can run."""

from __future__ import annotations

from executor.native.library import NativeLibrary, load_native, usable_instruction_sets

INSTRUCTION_SETS = [instructions.name for instructions in usable_instruction_sets()]


def library_of(instructions: str) -> NativeLibrary:
    """The library built for an instruction set that this processor has."""
    library = load_native(instructions)
    assert isinstance(library, NativeLibrary), library
    return library
