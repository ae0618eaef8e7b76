"""Triton's interpreter without work that it repeats: the same results in half the time.

At each launch it replaces the functions of `triton.language`, and again at each call of one function of a kernel by
another. Here they are replaced once, until the tests of a module have ended. With each value it makes descriptions of
its type and shape, which are looked up here. It computes sums and products of integers a second time, in 64 bits, for
an assertion that is off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter


class LastingPatches:
    """What is replaced, by the module whose functions use it."""

    def __init__(self, patch_lang: Any) -> None:
        self._patch_lang = patch_lang
        self._scopes: dict[str, Any] = {}

    def patch(self, fn: FunctionType) -> LastingPatches:
        """Stands in for `_patch_lang`. The interpreter restores what it returns when a launch ends."""
        if fn.__module__ not in self._scopes:
            self._scopes[fn.__module__] = self._patch_lang(fn)
        return self

    def restore(self) -> None:
        """Undoes nothing: the next launch needs it again."""

    def undo(self) -> None:
        """Undoes all replacements, the last one first."""
        while self._scopes:
            self._scopes.popitem()[1].restore()


def numpy_types() -> Callable[[Any], Any]:
    """Stands in for `_get_np_dtype`."""
    find, known = interpreter._get_np_dtype, dict[str, Any]()

    def known_type(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = find(dtype)
        return known[dtype.name]

    return known_type


def quick_tensor() -> Callable[[Any, Any, Any], None]:
    """Stands in for the constructor of `tensor`."""
    construct, known = tl.tensor.__init__, dict[tuple[int, ...], Any]()

    def initialize(self: Any, handle: Any, type: Any) -> None:
        sizes = type.shape if type.is_block() else ()
        if sizes in known:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = known[sizes]
        else:
            construct(self, handle, type)
            known[sizes] = self.numel, self.shape

    return initialize


def quick_block_type() -> Callable[[Any, Any, Any], None]:
    """Stands in for the constructor of `block_type`."""
    construct, known = tl.block_type.__init__, dict[tuple[Any, ...], dict[str, Any]]()

    def initialize(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key in known:
            vars(self).update(known[key])
        else:
            construct(self, element_ty, shape)
            known[key] = dict(vars(self))

    return initialize


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Launches repeat nothing in this context."""
    patches, builder = LastingPatches(interpreter._patch_lang), interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patches.patch)
        patch.setattr(interpreter, "_get_np_dtype", numpy_types())
        patch.setattr(tl.tensor, "__init__", quick_tensor())
        patch.setattr(tl.block_type, "__init__", quick_block_type())
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        try:
            yield
        finally:
            patches.undo()
