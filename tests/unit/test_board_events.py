"""The board's list of operational events: one entry for each, bounded, repetitions counted together."""

from __future__ import annotations

from pathlib import Path

from inflight.router.config.tenants import TenantConfigFile
from inflight.router.ledger.types import LedgerCall
from inflight.router.telemetry.event_log import MAX_EVENTS, MERGE_S, EventKind, EventLog
from tests.support.clock import Clock


def log_of(clock: Clock | None = None) -> EventLog:
    return EventLog(clock or Clock(), lambda: 1_790_000_000_000)


def texts(log: EventLog) -> list[str]:
    return [event.text for event in log.since(0)]


def test_executor_joins_is_lost_with_its_requests_and_comes_back() -> None:
    log = log_of()
    log.executor_linked("executor-0", "tiny")
    log.executor_lost("executor-0", "tiny", 6)
    log.executor_linked("executor-0", "tiny")
    log.executor_lost("executor-0", "tiny", 1)
    assert texts(log) == [
        "executor-0 joined",
        "executor-0 lost, 6 requests moved",
        "executor-0 is back",
        "executor-0 lost, 1 request moved",
    ]
    assert log.since(0)[1].at_ms == 1_790_000_000_000


def test_draining_is_told_once_and_its_end_too() -> None:
    log = log_of()
    for is_draining in (False, True, True, False):
        log.executor_reported("executor-0", "tiny", is_draining=is_draining, num_preemptions=0)
    assert texts(log) == ["executor-0 takes no new work", "executor-0 takes new work again"]


def test_preemptions_are_counted_in_one_entry_for_a_while() -> None:
    clock = Clock()
    log = log_of(clock)
    for total in (7, 8, 20):
        log.executor_reported("executor-0", "tiny", is_draining=False, num_preemptions=total)
        clock.now_s += MERGE_S / 4
    assert texts(log) == ["executor-0 preempted 13 sequences"]  # what was before the first report is not news
    first_id = log.since(0)[0].entry_id
    clock.now_s += MERGE_S
    log.executor_reported("executor-0", "tiny", is_draining=False, num_preemptions=21)
    assert texts(log) == ["executor-0 preempted 13 sequences", "executor-0 preempted 1 sequence"]
    assert log.since(0)[0].entry_id == first_id


def test_storm_of_preemptions_leaves_room_for_other_events() -> None:
    log = log_of()
    log.executor_lost("executor-1", "tiny", 2)
    for total in range(2 * MAX_EVENTS):
        log.executor_reported("executor-0", "tiny", is_draining=False, num_preemptions=total)
    assert len(log.since(0)) == 2


def test_list_is_bounded_and_tells_what_is_new() -> None:
    log = log_of()
    for number in range(MAX_EVENTS + 10):
        log.add(EventKind.EXECUTOR_LOST, f"executor-{number}")
    assert len(log.since(0)) == MAX_EVENTS
    assert [event.subject for event in log.since(log.newest - 1)] == [f"executor-{MAX_EVENTS + 9}"]


def test_redis_is_told_of_when_it_goes_and_when_it_is_back() -> None:
    log = log_of()
    for succeeded in (True, False, False, True, True):
        log.ledger_called(LedgerCall("submit", 0.0, 0.1, succeeded))
    assert texts(log) == ["Redis is unavailable", "Redis is available again"]


def test_admission_file_is_told_of_when_it_changes(tmp_path: Path) -> None:
    log, path = log_of(), tmp_path / "admission.toml"
    path.write_text("")
    file = TenantConfigFile.open(path, frozenset({"tiny"}), log.admission_file_read)
    assert texts(log) == []
    path.write_text("no such line\n")
    file.look()
    path.write_text("# fine\n")
    file.look()
    refused, loaded = texts(log)
    assert refused.startswith("the admission file was refused: ")
    assert loaded == "the admission file was reloaded"


def test_every_kind_has_a_text_and_a_name_of_its_own() -> None:
    log = log_of()
    for kind in EventKind:
        log.add(kind, "executor-0", "tiny", 1, "why")
    assert all("{" not in text for text in texts(log))
    # Only this kind is ever added with a detail. A place for one in another text would never be filled.
    assert [event.kind for event in log.since(0) if event.text.endswith("why")] == [EventKind.ADMISSION_REFUSED]
    assert len({kind.value.name for kind in EventKind}) == len(EventKind)
