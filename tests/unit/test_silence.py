"""A peer that says nothing is given up; one is not blamed for this process standing still."""

from __future__ import annotations

from inflight.router.executors.link import LivenessTimer


def test_silence_is_over_after_so_many_looks() -> None:
    silence = LivenessTimer(3)
    assert [silence.check(0.0) for _ in range(3)] == [False, False, True]
    assert silence.is_over


def test_a_word_begins_the_count_anew() -> None:
    silence = LivenessTimer(2)
    assert not silence.check(0.0)
    silence.record_message()
    assert not silence.check(0.0)
    assert not silence.check(0.0)
    assert silence.check(0.0)


def test_a_late_look_begins_the_count_anew() -> None:
    silence = LivenessTimer(2)
    assert not silence.check(0.0)
    assert not silence.check(7.0)
    assert not silence.check(0.0)
    assert silence.check(0.0)
