"""Ctrl-C while an answer comes: ends the answer, on the server too, and not the chat."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from inflight.sync_stream import Stream


@contextmanager
def ctrl_c_cancels(stream: Stream) -> Iterator[None]:
    """Makes the first Ctrl-C cancel the stream, which then ends without an error; another one raises as ever.

    An exception in the middle of gRPC's code may get lost, or be raised while a lock is held, so the signal raises
    none: it cancels from a thread of its own.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=stream.cancel, daemon=True).start()

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
