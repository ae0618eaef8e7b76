"""Quality figures: the arithmetic, the report, and a measurement of a tiny model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from inflight.bench.engine import quality
from inflight.bench.engine.quality import (
    Agreement,
    LongResult,
    QualityReport,
    Result,
    agreement,
    cut,
    num_needles_found,
    page_of,
    perplexity,
    values_of,
)
from inflight.bench.engine.teacher_forcing import Predictions


def compared(
    reference_ids: list[int], gaps: list[float], reference: list[float], ids: list[int], found: list[float]
) -> Agreement:
    """The agreement of predictions, whose own gaps do not count."""
    return agreement(Predictions(reference_ids, gaps, reference), Predictions(ids, [], found))


def test_perplexity_is_the_number_of_equally_likely_tokens() -> None:
    assert perplexity([math.log(1 / 8)] * 5) == pytest.approx(8)
    assert perplexity([math.log(1 / 4), math.log(1 / 16)]) == pytest.approx(8)


def test_gaps_are_the_references_where_the_likeliest_token_differs() -> None:
    figures = compared([1, 2, 3, 4], [0.5, 0.1, 3.0, 0.2], [-1.0] * 4, [1, 9, 3, 9], [-1.0] * 4)
    assert (figures.num_positions, figures.num_different, figures.share_equal) == (4, 2, 0.5)
    assert (figures.gap_p50, figures.gap_p99, figures.gap_max) == (0.1, 0.2, 0.2)
    assert figures.share_of_smaller_gaps == 0.5


def test_no_difference_has_no_gaps() -> None:
    figures = compared([1, 2], [0.5, 0.1], [-1.0, -3.0], [1, 2], [-1.0, -3.0])
    assert figures.share_equal == 1
    assert figures.gap_max is None
    assert figures.share_of_smaller_gaps is None
    assert figures.perplexity == pytest.approx(math.exp(2))


def test_error_of_the_change_is_that_of_the_paired_differences() -> None:
    # Given log probabilities that vary far more than their differences from the reference's
    reference = [-1.0, -9.0, -4.0, -0.5]
    found = [-1.3, -9.1, -4.3, -0.6]
    figures = compared([1] * 4, [0.5] * 4, reference, [1] * 4, found)
    # Then it is the deviation of 0.3, 0.1, 0.3, 0.1 divided by the root of their number
    assert figures.change_error == pytest.approx(math.sqrt(4 * 0.1**2 / 3) / 2)
    assert compared([1], [0.5], [-1.0], [1], [-1.0]).change_error is None


def test_text_is_cut_into_prompts_of_one_length_without_overlap() -> None:
    assert cut(range(11), 3) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_report_has_a_line_for_every_variant_and_path() -> None:
    other = compared([1, 2], [0.5, 0.125], [-1.0, -1.0], [1, 3], [-1.0, -1.1])
    report = QualityReport({"model": "tiny"}, math.e, (Result("bfloat16", "one by one", other),))
    row = "| bfloat16 | one by one | 2.8577 | +5.127% | 5.000% | 50.00% | 1 of 2 | 0.125 | 0.125 | 0.125 | 50.0% |"
    assert row in page_of(report).markdown()
    assert values_of(report)["results"][0]["num_different"] == 1


def test_needle_is_found_if_every_digit_is_the_likeliest() -> None:
    digits = list(range(20, 28))
    needles = [[1, 2, *digits], [3, *digits], [4, 5, *digits]]
    one_wrong = [*digits[:-1], 9]
    assert num_needles_found(needles, [0, *digits, *one_wrong, 0, *digits]) == 2


def test_report_has_a_line_for_every_variant_with_long_contexts() -> None:
    same = compared([1, 2], [0.5, 0.125], [-1.0, -1.0], [1, 2], [-1.0, -1.0])
    long = (LongResult("reference", same, 8, 8), LongResult("int8 KV", same, 7, 8))
    markdown = page_of(QualityReport({}, math.e, (), long)).markdown()
    assert (
        "| int8 KV | chunks of 64 | 2.7183 | +0.000% | 0.000% | 100.00% | 0 of 2 | – | – | – | – | 7 of 8 |" in markdown
    )


def test_unknown_variant_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quality.main(["--variants", "float8"])
    assert "'float8' is not one of float32, bfloat16" in capsys.readouterr().err


def test_model_that_is_not_there_is_an_error_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quality.main(["--model", str(tmp_path / "nowhere"), "--out", str(tmp_path)]) == 1
    assert "nowhere" in capsys.readouterr().err
