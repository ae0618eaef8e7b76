"""The checker of `make chaos` itself: it sees a token that is lost, repeated or wrong, and a block that leaked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import grpc
import pytest

from inflight import AsyncClient
from inflight.bench.chaos.adapters import AdapterHistory
from inflight.bench.chaos.gaps import Window, gaps_by_kind
from inflight.bench.chaos.load import AdapterSamples, Load, Manner, Sent, is_adapter_gone, is_promised_refusal
from inflight.bench.chaos.observed import Observed, Verdict, judge
from inflight.bench.chaos.report import BEGIN, END, fill, page
from inflight.bench.chaos.requests import Expected, SampleKind, SampleRequest
from inflight.bench.chaos.schedule import Fault, FaultKind, faults
from inflight.bench.chaos.tally import Tally, tally
from inflight.bench.fleet.health import Leak
from inflight.errors import InflightError
from inflight.events import Accepted, Delta, Done, Finished, FinishReason, Timing, Usage

IDS = SampleRequest("ids-0", SampleKind.IDS, 6, prompt_ids=(1, 2))
TEXT = SampleRequest("text-1", SampleKind.TEXT, 6, prompt="a b")
ADAPTED = SampleRequest("ids-0", SampleKind.IDS, 6, prompt_ids=(1, 2), model="m:a")
NO_CLIENT = cast(AsyncClient, None)
DUE = Expected((10, 11, 12, 13, 14, 15), "abcdéf", "length")
WHOLE = [(0, (10, 11), "ab"), (2, (12,), "c"), (3, (13, 14, 15), "déf")]

Piece = tuple[int, tuple[int, ...], str]


def observed(pieces: list[Piece], sample: SampleRequest = IDS, *, counted: int = 6, ends: bool = True) -> Observed:
    """A stream that brought these pieces, a second apart."""
    seen = Observed(sample, 0.0)
    seen.add(Accepted("r", "t", 2, 6), 0.5)
    for at, (offset, ids, text) in enumerate(pieces):
        seen.add(Delta(text, ids if sample.wants_ids else (), offset, len(ids)), 1.0 + at)
    if ends:
        seen.add(Finished(0, FinishReason.LENGTH), 9.0)
        seen.add(Done(Usage(2, 0, counted, 0), Timing(None, None, None, None, 0)), 9.0)
    seen.was_left = not ends
    seen.ended_s = 9.0
    return seen


@pytest.mark.parametrize("sample", [IDS, TEXT])
def test_stream_that_brings_everything_once_is_right(sample: SampleRequest) -> None:
    assert judge(observed(WHOLE, sample), DUE) == Verdict()


def test_stream_that_its_client_left_is_right_as_far_as_it_went() -> None:
    assert judge(observed(WHOLE[:2], ends=False), DUE) == Verdict()
    assert judge(observed([(0, (10, 99), "ab")], ends=False), DUE).lost == 1


@pytest.mark.parametrize("sample", [IDS, TEXT])
@pytest.mark.parametrize(
    ("pieces", "lost", "duplicated"),
    [
        pytest.param([WHOLE[0], WHOLE[2]], 1, 0, id="missing in the middle"),
        pytest.param(WHOLE[:2], 3, 0, id="missing at the end"),
        pytest.param([WHOLE[0], WHOLE[0], *WHOLE[1:]], 0, 2, id="repeated"),
        pytest.param([*WHOLE, (6, (16,), "g")], 0, 1, id="one too many"),
    ],
)
def test_token_that_is_missing_or_came_again_is_counted(
    sample: SampleRequest, pieces: list[Piece], lost: int, duplicated: int
) -> None:
    verdict = judge(observed(pieces, sample), DUE)
    assert (verdict.lost, verdict.duplicated) == (lost, duplicated)
    assert not verdict.is_right


def test_wrong_token_is_found_where_it_is() -> None:
    verdict = judge(observed([WHOLE[0], (2, (99,), "c"), WHOLE[2]]), DUE)
    assert (verdict.lost, verdict.duplicated) == (1, 0)
    assert verdict.problem == "1 wrong tokens, the first at offset 2"


@pytest.mark.parametrize(
    ("text", "lost", "duplicated"), [("dé", 1, 0), ("dé\ufffdf", 0, 1), ("dèf", 1, 0)], ids=["cut", "longer", "wrong"]
)
def test_wrong_text_of_right_tokens_is_counted(text: str, lost: int, duplicated: int) -> None:
    verdict = judge(observed([*WHOLE[:2], (3, (13, 14, 15), text)], TEXT), DUE)
    assert (verdict.lost, verdict.duplicated) == (lost, duplicated)
    assert "text differs" in (verdict.problem or "")


def test_wrong_end_and_wrong_count_are_problems() -> None:
    assert judge(observed(WHOLE, counted=9), DUE).problem == "9 output tokens counted instead of 6"
    stopped = replace(DUE, finish_reason="stop_string")
    assert judge(observed(WHOLE), stopped).problem == "finished by length instead of stop_string"


def tally_of(*sent: Sent, leak: Leak | None = Leak(0, 0, 0)) -> Tally:  # noqa: B008 - a value
    return tally({}, sent, [], [], leak, was_interrupted=leak is None)


def sent(verdict: Verdict) -> Sent:
    return Sent(1, Manner.READ, observed(WHOLE), verdict, refused=False, failed=not verdict.is_right)


def test_last_line_says_what_was_wrong_and_only_a_clean_run_is_right() -> None:
    clean = tally_of(sent(Verdict()))
    assert clean.is_right
    assert clean.last_line == "chaos: requests=1 deaths=0 resumed=0 lost=0 duplicated=0 leaked_blocks=0"
    for wrong, words in [
        (tally_of(sent(Verdict(lost=2))), "lost=2 duplicated=0 leaked_blocks=0"),
        (tally_of(sent(Verdict(duplicated=1))), "lost=0 duplicated=1 leaked_blocks=0"),
        (tally_of(leak=Leak(3, 4, 0)), "lost=0 duplicated=0 leaked_blocks=7"),
        (tally_of(sent(Verdict(problem="finished by error"))), "lost=0 duplicated=0 leaked_blocks=0"),
        (tally_of(leak=Leak(0, 0, 1)), "lost=0 duplicated=0 leaked_blocks=0"),
    ]:
        assert not wrong.is_right
        assert wrong.last_line.endswith(words)
        assert page(wrong).last_lines == [wrong.last_line]


def test_only_new_work_may_be_told_to_come_again() -> None:
    refusal = InflightError(grpc.StatusCode.UNAVAILABLE, "Redis is away", retry_after_s=1.0)
    twice = InflightError(grpc.StatusCode.ALREADY_EXISTS, "known", reason="DUPLICATE_REQUEST_ID")
    fresh = Observed(IDS, 0.0, error=refusal)
    assert is_promised_refusal(fresh, Manner.READ)
    assert is_promised_refusal(replace(fresh, error=twice), Manner.UNKEYED)
    assert not is_promised_refusal(replace(fresh, error=twice), Manner.READ)
    lost = InflightError(grpc.StatusCode.DATA_LOSS, "ended", reason="OUTPUT_LOST")
    assert is_promised_refusal(replace(fresh, error=lost), Manner.REPEAT)
    assert not is_promised_refusal(replace(fresh, error=lost), Manner.READ)
    assert not is_promised_refusal(replace(fresh, error=lost, offsets=[(0, 1)]), Manner.REPEAT)
    for other in (
        replace(fresh, was_accepted=True),
        replace(fresh, offsets=[(0, 1)]),
        replace(fresh, error=InflightError(grpc.StatusCode.UNAVAILABLE, "gone")),
        replace(fresh, error=InflightError(grpc.StatusCode.INTERNAL, "broken", retry_after_s=1.0)),
    ):
        assert not is_promised_refusal(other, Manner.READ)


def adapted_samples() -> AdapterSamples:
    """A sample with an adapter that meant version 0 until all routers knew of version 1, at 3 s, and nothing since 6 s;
    the changes began at 2 s and 5 s."""
    history = AdapterHistory()
    history.change("a", 0, 0.0)
    for version, began_s, known_s in ((1, 2.0, 3.0), (None, 5.0, 6.0)):
        history.change("a", version, began_s)
        history.settle("a", known_s)
    return AdapterSamples({ADAPTED: {0: DUE, 1: replace(DUE, token_ids=(10, 11, 12, 13, 14, 99))}}, history)


def test_tokens_are_those_of_a_version_that_the_name_stood_for_at_the_admission() -> None:
    adapted = adapted_samples()
    assert [adapted.versions(ADAPTED, since, since + 0.5) for since in (1.0, 2.0, 3.0, 4.6, 6.0)] == [
        {0}, {0, 1}, {1}, {1, None}, {None},
    ]  # fmt: skip

    def failure_of(began_s: float, accepted_s: float) -> str | None:
        seen = observed(WHOLE, ADAPTED)
        seen.began_s, seen.accepted_s = began_s, accepted_s
        load = Load(NO_CLIENT, {}, 0, (Manner.READ,), adapted=adapted)
        return load.judged(1, Manner.READ, seen, began_s).verdict.problem

    assert failure_of(0.5, 0.6) is None
    assert failure_of(1.9, 2.9) is None
    assert failure_of(0.5, 5.5) is None
    assert failure_of(3.1, 3.2) == "its tokens are of version 0 of the adapter, and due was one of [1]"
    assert failure_of(6.1, 6.2) == "its tokens are of version 0 of the adapter, and due was one of [None]"


def test_request_may_fail_for_its_adapter_only_while_that_is_absent_or_changes() -> None:
    adapted = adapted_samples()
    unknown = InflightError(grpc.StatusCode.NOT_FOUND, "no such adapter", reason="UNKNOWN_ADAPTER")
    gone = InflightError(grpc.StatusCode.FAILED_PRECONDITION, "none serves it", reason="NEVER_FITS")

    def is_due(error: InflightError, began_s: float, ended_s: float, sample: SampleRequest = ADAPTED) -> bool:
        return is_adapter_gone(Observed(sample, began_s, error=error, ended_s=ended_s), adapted, began_s)

    assert is_due(unknown, 6.1, 6.2)
    assert is_due(unknown, 4.0, 5.1)
    assert not is_due(unknown, 3.0, 4.0)
    assert not is_due(unknown, 6.1, 6.2, IDS)
    assert is_due(gone, 1.0, 2.5)
    assert is_due(gone, 3.5, 7.0)
    assert not is_due(gone, 3.1, 4.9)
    accepted = Observed(ADAPTED, 6.1, error=unknown, ended_s=6.2, was_accepted=True)
    assert not is_adapter_gone(accepted, adapted, 6.1)


def test_gap_is_the_longest_pause_around_a_fault() -> None:
    # Tokens arrive at 1, 2 and 3 s; the fault is from 2.5 to 2.8 s.
    fault = Fault(1, FaultKind.EXECUTOR_KILL, 0.0, 0, 0)
    calm, killed = gaps_by_kind([Window(fault, 2.5, 2.5, 2.8)], [observed(WHOLE)])
    assert (killed.num_running, killed.max_s, killed.holds) == (1, 1.0, True)
    assert (calm.kind, calm.max_s) == (None, 1.0)
    late = observed([(0, (10, 11), "ab"), (2, (12,), "c")])
    late.arrivals_s = [1.0, 20.0]
    late.ended_s = 21.0
    _, killed = gaps_by_kind([Window(fault, 2.5, 2.5, 2.8)], [late])
    assert (killed.max_s, killed.holds) == (19.0, False)


def test_seed_makes_the_schedule_and_every_kind_comes_before_any_comes_again() -> None:
    kinds = tuple(FaultKind)
    one, same, other = (
        [next(schedule) for _ in range(2 * len(kinds))]
        for schedule in (faults(7, kinds, 2, 3), faults(7, kinds, 2, 3), faults(8, kinds, 2, 3))
    )
    assert one == same
    assert one != other
    assert {fault.kind for fault in one[: len(kinds)]} == set(kinds) == {fault.kind for fault in one[len(kinds) :]}


def test_measured_gaps_go_into_their_place_on_the_page(tmp_path: Path) -> None:
    path = tmp_path / "failures.md"
    path.write_text(f"before\n{BEGIN}old\n{END}\nafter\n")
    fill(path, tally_of())
    fill(path, tally_of())
    text = path.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert text.count("chaos: requests=0") == 1
    path.write_text("no place")
    with pytest.raises(ValueError, match="no place"):
        fill(path, tally_of())
