"""Tables at the end of the demo: the answers, and in-flight against static batching."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from inflight.cli.demo.prompts import CHECKED_PROMPT, CHECKED_WORD
from inflight.cli.demo.round import Round


def answers_table(finished: Round) -> Table:
    """Returns every prompt with the beginning of its answer."""
    table = Table(box=None, header_style="bold")
    table.add_column("#", justify="right", min_width=2)
    table.add_column("prompt", no_wrap=True, overflow="ellipsis", max_width=32)
    table.add_column("answer", no_wrap=True, overflow="ellipsis", max_width=56)
    table.add_column("tokens", justify="right", min_width=6)
    table.add_column("ended by", min_width=10)
    for rider in finished.riders:
        answer = " ".join(rider.text.split())
        table.add_row(str(rider.number), rider.prompt.text, answer, str(rider.num_tokens), rider.ending)
    return table


def comparison_table(inflight: Round, static: Round) -> Table:
    """Both rounds, and how many times better in-flight batching was."""
    table = Table("", "static", "in-flight", "better by", box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = (
        ("output tokens/s", static.output_tokens_per_s, inflight.output_tokens_per_s, "", True),
        ("total time", static.total_s, inflight.total_s, " s", False),
        ("time to first token, p50", _quantile(static, 0.5), _quantile(inflight, 0.5), " s", False),
        ("time to first token, p99", _quantile(static, 0.99), _quantile(inflight, 0.99), " s", False),
        ("output tokens", static.num_tokens, inflight.num_tokens, "", None),
    )
    for name, before, after, unit, more_is_better in rows:
        digits = 0 if more_is_better is None else 2 if unit else 1
        factor = "" if more_is_better is None else _factor(before, after, more_is_better=more_is_better)
        table.add_row(name, f"{before:.{digits}f}{unit}", f"{after:.{digits}f}{unit}", factor)
    return table


def names_the_capital(finished: Round) -> bool:
    """Returns whether the checked question was answered correctly."""
    answers = [rider.text for rider in finished.riders if rider.prompt.text == CHECKED_PROMPT]
    return bool(answers) and all(CHECKED_WORD in answer.lower() for answer in answers)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Returns the nearest-rank quantile of values in ascending order; NaN of none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def _quantile(finished: Round, share: float) -> float:
    return quantile(finished.first_token_times_s, share)


def _factor(before: float, after: float, *, more_is_better: bool) -> str:
    smaller, larger = (before, after) if more_is_better else (after, before)
    return f"{larger / smaller:.2f} ×" if smaller > 0 else ""
