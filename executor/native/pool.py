"""Threads of the C++ code (pool.h). Between calls they wait without occupying a core."""

from __future__ import annotations

import weakref
from ctypes import c_int64, c_void_p

from inflight.executor.native.library import NativeLibrary


class NativePool:
    """A pool of `num_threads`, the caller's included. One call at a time may use it."""

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        assert num_threads > 0
        new, free = library.calls.inflight_pool_new, library.calls.inflight_pool_free
        new.argtypes, new.restype = (c_int64,), c_void_p
        free.argtypes, free.restype = (c_void_p,), None
        self.num_threads = num_threads
        # The argument of calls into the library.
        self.address = int(new(num_threads))
        self._end = weakref.finalize(self, free, self.address)

    def close(self) -> None:
        """Ends the threads. Garbage collection of the pool does so too."""
        self._end()
