"""Earlier outputs that proposers look through: by salt only, and bounded."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from hypothesis import given
from hypothesis import strategies as st

from inflight.executor.scheduler.drafting import Drafting
from inflight.executor.scheduler.sequence import Sampling, Sequence, Stopping
from inflight.executor.speculation.budget import DraftBudget
from inflight.executor.speculation.earlier import EarlierOutputs
from inflight.executor.speculation.proposer import NO_DRAFT, Draft

SALTS = (b"acme\0", b"acme\0mine", b"other\0", None)


class Recorder:
    """A proposer that keeps what it is given."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def extend(self, ids: SequenceOf[int]) -> None:
        self.ids += ids

    def propose(self, limit: int) -> Draft:
        return NO_DRAFT


def sequence_of(name: str, prompt: list[int], output: list[int], salt: bytes | None, max_drafts: int = 7) -> Sequence:
    greedy, stopping = Sampling(0.0, 0, 1.0, 0), Stopping(9, 0, frozenset())
    return Sequence(name, 1, prompt + output, len(prompt), greedy, stopping, 1, salt, max_drafts=max_drafts)


@given(st.lists(st.tuples(st.sampled_from(SALTS), st.lists(st.integers(0, 999), max_size=6)), max_size=20))
def test_a_sequence_gets_the_newest_outputs_of_its_own_salt_and_no_others(
    ended: list[tuple[bytes | None, list[int]]],
) -> None:
    earlier = EarlierOutputs(max_tokens_each=8, max_salts=3)
    for salt, ids in ended:
        earlier.add(salt, ids)

    for salt in SALTS:
        own = [token_id for other, ids in ended if other == salt for token_id in ids]
        assert earlier.of(salt) == (tuple(own[-8:]) if salt is not None else ())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), max_size=50))
def test_salts_and_tokens_are_bounded(ended: list[tuple[int, int]]) -> None:
    earlier = EarlierOutputs(max_tokens_each=8, max_salts=3)
    for number, length in ended:
        earlier.add(bytes([number]), [number] * length)
        assert len(earlier) <= 3
        assert earlier.of(bytes([number]))[-length:] == (number,) * min(length, 8)
        assert all(len(earlier.of(bytes([each]))) <= 8 for each in range(10))


def test_salt_used_least_recently_is_dropped() -> None:
    earlier = EarlierOutputs(max_salts=2)
    earlier.add(b"a", [1])
    earlier.add(b"b", [2])
    assert earlier.of(b"a") == (1,)
    earlier.add(b"c", [3])

    assert (earlier.of(b"a"), earlier.of(b"b"), earlier.of(b"c")) == ((1,), (), (3,))


def test_proposer_of_a_sequence_is_given_outputs_of_its_salt_and_never_a_prompt_or_an_output_of_another() -> None:
    proposers: list[Recorder] = []

    def make() -> Recorder:
        proposers.append(Recorder())
        return proposers[-1]

    drafting = Drafting(make, DraftBudget())
    drafting.forget(sequence_of("a", [1, 2], [3, 4], b"acme\0"))
    drafting.forget(sequence_of("b", [1, 2], [5, 6], b"other\0"))
    drafting.forget(sequence_of("c", [1, 2], [7, 8], None))
    drafting.forget(sequence_of("d", [1, 2], [9], b"acme\0", max_drafts=0))

    for salt in (b"acme\0", b"other\0", b"third\0", None):
        drafting._draft(sequence_of("e", [11], [12], salt))

    assert [proposer.ids for proposer in proposers] == [[3, 4, 11, 12], [5, 6, 11, 12], [11, 12], [11, 12]]
