"""Number of drafted tokens that a step verifies. Pure, and deterministic in its calls.

A drafted token is used if it and all drafted before it are accepted: its *survival* is the product of the acceptance of
these positions. Acceptance is learned per match length and position, and apart for what a grammar forces. The drafts of
all sequences compete for the step: the likeliest are taken, as many as maximise expected tokens per second. A decision
affects speed and never a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

from inflight.executor.speculation.proposer import Draft

# Weight of the newest observation. The first ones weigh more, so that a bad start is forgotten soon.
NEWEST = 1 / 32
# Acceptance that is assumed before the first observation, by match length, up to the longest that is told apart.
PRIOR = (0.0, 0.15, 0.3, 0.45, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9)
# The same of what a grammar forces, which the model may still write with other tokens.
FORCED_PRIOR = 0.9
# Positions of a draft that are told apart.
NUM_POSITIONS = 8
# Observations that the prior counts as.
PRIOR_WEIGHT = 4


class DraftBudget:
    """Decides how much of each draft a step verifies, and learns from what was accepted."""

    def __init__(self) -> None:
        # The last row is of forced ids.
        self._acceptance = [[prior] * NUM_POSITIONS for prior in (*PRIOR, FORCED_PRIOR)]
        self._num_observed = [[0] * NUM_POSITIONS for _ in self._acceptance]

    def choose(self, drafts: Sequence[Draft], rows: int, time_of_step: Callable[[int], float], limit: int) -> list[int]:
        """Returns how many ids of each draft to verify, at most `limit` in all.

        `drafts` has one element per sequence that yields a token in the step, an empty one where nothing matches.
        `rows` is the number of tokens that the step computes without drafts. `time_of_step` gives the seconds of a step
        by its tokens; it must not fall as they rise, and is called about once for each id.
        """
        chosen = [0] * len(drafts)
        candidates: list[tuple[float, int]] = []
        # By what determines them, since many drafts are alike.
        survivals: dict[tuple[int, int, int], list[float]] = {}
        for index, draft in enumerate(drafts):
            if draft.ids:
                shape = min(draft.match_length, len(PRIOR) - 1), len(draft.ids), draft.num_forced
                if shape not in survivals:
                    survivals[shape] = self.survivals(draft)
                candidates += [(-survival, index) for survival in survivals[shape]]
        if not candidates or limit <= 0:
            return chosen
        # A stable order: equal survivals go to the first sequence, and the positions of a draft stay in order.
        candidates.sort()
        del candidates[limit:]
        for _, index in candidates[: _most_tokens_per_second(candidates, len(drafts), rows, time_of_step)]:
            chosen[index] += 1
        return chosen

    def survivals(self, draft: Draft) -> list[float]:
        """Returns for each id of the draft the probability that it is accepted with all before it."""
        kinds = (_kind(draft, position) for position in range(len(draft.ids)))
        return list(accumulate((self._acceptance[row][column] for row, column in kinds), mul))

    def observe(self, draft: Draft, verified: int, accepted: int) -> None:
        """Learns that of the first `verified` ids of a draft the first `accepted` were right.

        The token that follows the verified ids may be compared with the draft too: then it counts as verified. So
        acceptance is learned without cost also where drafts do not pay.
        """
        assert 0 <= accepted <= verified <= len(draft.ids)
        for position in range(min(verified, accepted + 1)):
            self._learn(*_kind(draft, position), position < accepted)

    def _learn(self, row: int, column: int, accepted: bool) -> None:
        acceptance, counts = self._acceptance[row], self._num_observed[row]
        counts[column] += 1
        weight = max(NEWEST, 1 / (PRIOR_WEIGHT + counts[column]))
        acceptance[column] += weight * (accepted - acceptance[column])


def _kind(draft: Draft, position: int) -> tuple[int, int]:
    """Returns row and column of the acceptance that counts for an id."""
    row = len(PRIOR) if position < draft.num_forced else min(draft.match_length, len(PRIOR) - 1)
    return row, min(position, NUM_POSITIONS - 1)


def _most_tokens_per_second(
    candidates: Sequence[tuple[float, int]], samples: int, rows: int, time_of_step: Callable[[int], float]
) -> int:
    """Returns the number of candidates, taken in order, for which a step yields most tokens per second."""
    seconds = time_of_step(rows)
    if seconds <= 0:
        return 0
    tokens = float(samples)
    most = tokens - sum(negative for negative, _ in candidates)
    best, best_rate = 0, tokens / seconds
    for number, (negative, _) in enumerate(candidates, 1):
        tokens -= negative
        seconds = time_of_step(rows + number)
        if tokens > best_rate * seconds:
            best, best_rate = number, tokens / seconds
        elif most <= best_rate * seconds:
            # Not even all drafts together would pay for a step of this length.
            break
    return best
