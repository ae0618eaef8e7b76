"""Shutdown of a process without waiting for a trace collector that does not answer."""

from __future__ import annotations

import threading

from inflight.common.telemetry.tracing import flush

TIMEOUT_S = 60


def test_sending_that_does_not_end_is_given_up() -> None:
    given_up = threading.Event()
    came_back = []
    flush(lambda: came_back.append(given_up.wait(TIMEOUT_S)), given_up.set, 0.01)
    assert came_back == [True]


def test_sending_that_ends_is_not_disturbed() -> None:
    given_up = threading.Event()
    flush(lambda: None, given_up.set, TIMEOUT_S)
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers), "it is cancelled"
    assert not given_up.is_set()
