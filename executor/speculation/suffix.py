"""Proposer by a suffix automaton in C++ (executor/native/automaton.cpp): the longest match of any length."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

from inflight.executor.native.build import BuildFailure
from inflight.executor.native.library import load_automaton
from inflight.executor.speculation.proposer import MAX_TOKENS, NO_DRAFT, Draft


class AutomatonLibrary:
    """The loaded library with the types of its calls."""

    def __init__(self, calls: ctypes.CDLL) -> None:
        self.new, self.free = calls.inflight_automaton_new, calls.inflight_automaton_free
        self.new.argtypes, self.new.restype = (c_int64,), c_void_p
        self.free.argtypes, self.free.restype = (c_void_p,), None
        self.extend = calls.inflight_automaton_extend
        self.extend.argtypes, self.extend.restype = (c_void_p, c_void_p, c_int64), c_int64
        self.propose = calls.inflight_automaton_propose
        self.propose.argtypes, self.propose.restype = (c_void_p, c_void_p, c_int64, c_void_p), c_int64
        self.num_bytes = calls.inflight_automaton_bytes
        self.num_bytes.argtypes, self.num_bytes.restype = (c_void_p,), c_int64

    @classmethod
    def load(cls) -> AutomatonLibrary | BuildFailure:
        """Loads the library, compiling it if necessary."""
        calls = load_automaton()
        return calls if isinstance(calls, BuildFailure) else cls(calls)


class SuffixProposer:
    """Looks up the longest suffix of the tokens that occurred before. Takes about 90 bytes per token, 200 at most, and
    forgets the older half at `max_tokens`."""

    def __init__(self, library: AutomatonLibrary, max_tokens: int = MAX_TOKENS) -> None:
        # Edges are counted in 32 bits.
        assert 1 < max_tokens <= 1 << 29
        self._library = library
        self._automaton = library.new(max_tokens)
        if not self._automaton:
            raise MemoryError("not enough memory for a proposer")
        weakref.finalize(self, library.free, self._automaton)
        self._match_length = c_int64()
        self._match_address = ctypes.addressof(self._match_length)
        self._ids = array("i")

    def extend(self, ids: Sequence[int]) -> None:
        """Appends tokens. Without memory it forgets the older ones."""
        added = array("i", ids)
        self._library.extend(self._automaton, *added.buffer_info())

    def propose(self, limit: int) -> Draft:
        """Returns what followed the longest match, at one of its last occurrences."""
        if len(self._ids) < limit:
            self._ids = array("i", bytes(4 * limit))
        number = self._library.propose(self._automaton, self._ids.buffer_info()[0], limit, self._match_address)
        return Draft(tuple(self._ids[:number]), self._match_length.value) if number > 0 else NO_DRAFT

    @property
    def num_bytes(self) -> int:
        """Memory of the automaton."""
        return int(self._library.num_bytes(self._automaton))
