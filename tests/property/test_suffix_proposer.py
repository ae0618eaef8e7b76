"""The suffix automaton finds the longest match, as a search through all tokens does, in bounded memory."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.executor.native import library as native
from inflight.executor.native.build import BuildFailure
from inflight.executor.speculation.choice import choose_proposer
from inflight.executor.speculation.proposer import NO_DRAFT, NgramProposer, following
from inflight.executor.speculation.suffix import AutomatonLibrary, SuffixProposer

MAX_BYTES_PER_TOKEN = 200
# Few different tokens, so that much repeats.
texts = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def library() -> AutomatonLibrary:
    loaded = AutomatonLibrary.load()
    if isinstance(loaded, BuildFailure):
        pytest.skip(loaded.reason)
    return loaded


def earlier_ends(ids: list[int], length: int) -> list[int]:
    """The numbers of tokens before which the last `length` tokens occurred, without the newest occurrence."""
    return [end for end in range(length, len(ids)) if ids[end - length : end] == ids[len(ids) - length :]]


def longest_match(ids: list[int]) -> int:
    return next((length for length in range(len(ids) - 1, 0, -1) if earlier_ends(ids, length)), 0)


class Window:
    """The tokens that a proposer remembers."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.ids: list[int] = []

    def extend(self, ids: list[int]) -> None:
        ids = ids[-self.max_tokens :]
        if len(self.ids) + len(ids) > self.max_tokens:
            self.ids = [*self.ids, *ids][-max(len(ids), self.max_tokens // 2) :]
        else:
            self.ids += ids


@given(texts, st.integers(0, 9), st.sampled_from([4, 9, 1000]))
def test_draft_continues_an_occurrence_of_the_longest_match(
    library: AutomatonLibrary, parts: list[list[int]], limit: int, max_tokens: int
) -> None:
    proposer, window = SuffixProposer(library, max_tokens), Window(max_tokens)
    for part in parts:
        proposer.extend(part)
        window.extend(part)
        draft, length = proposer.propose(limit), longest_match(window.ids)
        if length == 0 or limit == 0:
            assert draft == NO_DRAFT
            continue
        assert draft.match_length == length
        assert draft.ids in {following(window.ids, end, limit) for end in earlier_ends(window.ids, length)}


@given(texts)
def test_ngram_proposer_never_claims_a_longer_match(library: AutomatonLibrary, parts: list[list[int]]) -> None:
    suffix, ngram = SuffixProposer(library), NgramProposer()
    for part in parts:
        suffix.extend(part)
        ngram.extend(part)
        assert ngram.propose(4).match_length == (
            min(5, length) if (length := suffix.propose(4).match_length) > 1 else 0
        )


@pytest.mark.parametrize("size", [3000, 4096, 5000])
def test_memory_per_token_is_bounded_for_any_text(library: AutomatonLibrary, size: int) -> None:
    pick = random.Random(7)
    half = size // 2
    for ids in (
        [pick.randrange(2) for _ in range(size)],
        [pick.randrange(50_000) for _ in range(size)],
        [1] * size,
        # The texts with the most states and the most edges.
        [1] + [2] * (size - 1),
        [1] + [2] * half + [3] * (half - 1),
    ):
        proposer = SuffixProposer(library)
        proposer.extend(ids)
        assert proposer.num_bytes <= MAX_BYTES_PER_TOKEN * size


def test_memory_stays_bounded_beyond_the_tokens_that_are_kept(library: AutomatonLibrary) -> None:
    proposer, pick = SuffixProposer(library, 1000), random.Random(7)
    for _ in range(5000):
        proposer.extend([pick.randrange(50) for _ in range(3)])
        assert proposer.num_bytes <= MAX_BYTES_PER_TOKEN * 1000 + 4096


def test_match_is_a_recent_one(library: AutomatonLibrary) -> None:
    proposer = SuffixProposer(library)
    proposer.extend([1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 5, 0, 1, 2])
    assert proposer.propose(2).ids == (5, 0)


def test_without_a_compiler_drafts_are_looked_up_by_ngrams(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "load_library", lambda *_: BuildFailure("there is no compiler"))

    assert isinstance(choose_proposer("suffix")(), NgramProposer)
    assert "there is no compiler" in caplog.text


def test_unknown_proposer_is_refused() -> None:
    with pytest.raises(ValueError, match="ngram, suffix"):
        choose_proposer("oracle")
