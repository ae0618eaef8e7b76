"""Number of drafted tokens that a step verifies."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from inflight.executor.speculation.budget import DraftBudget
from inflight.executor.speculation.proposer import NO_DRAFT, Draft

lengths = st.tuples(st.integers(0, 3), st.integers(1, 9))
drafts = st.lists(lengths.map(lambda size: Draft((7,) * size[0], size[1] * bool(size[0]))), min_size=1, max_size=4)
# Seconds that each token of a step adds.
slopes = st.lists(st.floats(0.0, 0.5), min_size=40, max_size=40)
observations = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(0, 3)), max_size=30)


def budget_after(seen: list[tuple[int, int, int]]) -> DraftBudget:
    budget = DraftBudget()
    for match_length, verified, accepted in seen:
        budget.observe(Draft((1, 2, 3), match_length), verified, min(verified, accepted))
    return budget


def tokens_per_second(budget: DraftBudget, offered: list[Draft], chosen: list[int], seconds: list[float]) -> float:
    expected = sum(sum(budget.survivals(draft)[:number]) for draft, number in zip(offered, chosen, strict=True))
    return (len(offered) + expected) / seconds[len(offered) + sum(chosen)]


@given(drafts, observations, slopes, st.integers(0, 12))
def test_no_other_choice_yields_more_tokens_per_second(
    offered: list[Draft], seen: list[tuple[int, int, int]], slopes: list[float], limit: int
) -> None:
    budget = budget_after(seen)
    seconds = [1.0 + sum(slopes[:number]) for number in range(len(slopes))]

    chosen = budget.choose(offered, len(offered), lambda tokens: seconds[tokens], limit)

    others = [
        list(other) for other in product(*(range(len(draft.ids) + 1) for draft in offered)) if sum(other) <= limit
    ]
    assert chosen in others
    best = max(tokens_per_second(budget, offered, other, seconds) for other in others)
    assert tokens_per_second(budget, offered, chosen, seconds) >= best * (1 - 1e-12)
    assert chosen == budget.choose(offered, len(offered), lambda tokens: seconds[tokens], limit)


@given(drafts, observations)
def test_survival_never_rises_along_a_draft(offered: list[Draft], seen: list[tuple[int, int, int]]) -> None:
    budget = budget_after(seen)
    for draft in offered:
        survivals = budget.survivals(draft)
        assert survivals == sorted(survivals, reverse=True)
        assert all(0 <= survival <= 1 for survival in survivals)


@given(drafts, observations, st.integers(0, 12), st.floats(0, 1), st.floats(0, 1))
def test_costlier_rows_never_get_more_drafts(
    offered: list[Draft], seen: list[tuple[int, int, int]], limit: int, one: float, other: float
) -> None:
    budget = budget_after(seen)
    cheap, costly = sorted((one, other))

    def number(slope: float) -> int:
        return sum(budget.choose(offered, len(offered), lambda tokens: 1 + slope * tokens, limit))

    assert number(costly) <= number(cheap)


def test_nothing_is_chosen_and_no_time_asked_for_without_a_match() -> None:
    def refuse(tokens: int) -> float:
        raise AssertionError(tokens)

    assert DraftBudget().choose([NO_DRAFT] * 3, 3, refuse, 8) == [0, 0, 0]


def test_nothing_is_chosen_while_the_time_of_a_step_is_unknown() -> None:
    assert DraftBudget().choose([Draft((1, 2), 5)], 1, lambda tokens: 0.0, 8) == [0]


def test_everything_is_chosen_where_rows_are_free() -> None:
    assert DraftBudget().choose([Draft((1, 2), 5), NO_DRAFT, Draft((3,), 2)], 3, lambda tokens: 1.0, 8) == [2, 0, 1]


def test_rejections_end_drafting_and_compared_tokens_start_it_again() -> None:
    budget, draft = DraftBudget(), Draft((1, 2, 3), 3)

    def chosen() -> int:
        return budget.choose([draft], 1, lambda tokens: 1 + 0.2 * tokens, 8)[0]

    assert chosen() > 0
    for _ in range(50):
        budget.observe(draft, 1, 0)
    assert chosen() == 0
    for _ in range(50):
        budget.observe(draft, 1, 1)
    assert chosen() > 0


def test_acceptance_is_learned_apart_by_match_length() -> None:
    budget = DraftBudget()
    for _ in range(50):
        budget.observe(Draft((1,), 2), 1, 0)
        budget.observe(Draft((1,), 8), 1, 1)

    assert budget.choose([Draft((1,), 2), Draft((1,), 8)], 2, lambda tokens: 1 + 0.2 * tokens, 8) == [0, 1]
