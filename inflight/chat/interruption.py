"""Ctrl-C during an answer: cancels the request and does not end the chat."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from inflight.sync_stream import Stream


@contextmanager
def ctrl_c_cancels(stream: Stream) -> Iterator[None]:
    """Makes the first Ctrl-C cancel the stream, which then ends without an error. A second one raises as usual.

    An exception inside gRPC's code may be lost, or be raised while a lock is held, so the signal raises none: it
    cancels from another thread.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=stream.cancel, daemon=True).start()

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
