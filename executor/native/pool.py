"""The threads of our C++ code (pool.h), which wait between calls without taking a core."""

from __future__ import annotations

import weakref
from ctypes import c_int64, c_void_p

from executor.native.library import NativeLibrary


class NativePool:
    """As many threads, the caller's included. Of the calls that are given a pool, one may run at a time."""

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        assert num_threads > 0
        new, free = library.calls.inflight_pool_new, library.calls.inflight_pool_free
        new.argtypes, new.restype = (c_int64,), c_void_p
        free.argtypes, free.restype = (c_void_p,), None
        self.num_threads = num_threads
        # What a call takes.
        self.address = int(new(num_threads))
        self._end = weakref.finalize(self, free, self.address)

    def close(self) -> None:
        """Ends the threads; so does the end of whoever holds the pool."""
        self._end()
