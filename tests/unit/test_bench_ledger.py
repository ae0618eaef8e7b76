"""The benchmark of the admission ledger: its wire protocol, its commands, and a small run against a real Redis."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from itertools import pairwise

import pytest

from inflight.bench.ledger import main as ledger
from inflight.bench.ledger.commands import ID_MARKERS, Call, CallKind, Commands
from inflight.bench.ledger.figures import percentiles_ms
from inflight.bench.ledger.measure import MAX_NEXT_S, next_s
from inflight.bench.ledger.scale import PoolScale, executor_id, request_id, router_id
from inflight.bench.ledger.traffic import Traffic, TrafficError, shares
from inflight.bench.ledger.upkeep import Relay, Upkeep
from inflight.bench.ledger.wire import Connection, Template
from inflight.bench.redis.wire import Framing, WireError, command
from inflight.router.dispatch.report_pacer import INTERVAL_S

LAST_LINE = (
    r"admission: queued=50 executors=3 routers=16 admitted_per_s=(\d+) redis_us=(\d+\.\d+) "
    r"submit_p50_ms=(\d+\.\d+) submit_p99_ms=(\d+\.\d+) seat_p50_ms=(\d+\.\d+) seat_p99_ms=(\d+\.\d+)"
)
NESTED = b"*3\r\n*2\r\n$6\r\nQUEUED\r\n:7\r\n*0\r\n$-1\r\n"


@pytest.fixture(scope="session")
def redis_url(redis_admin_url: str) -> str:
    """Who measures Redis asks it more than a router does."""
    return redis_admin_url


def test_reply_in_pieces_is_whole_only_at_its_end() -> None:
    framing = Framing()
    for byte in NESTED[:-1]:
        framing.received.append(byte)
        assert framing.take() is None
    framing.received += NESTED[-1:] + b"+PONG\r\n"
    assert framing.take() == NESTED
    assert framing.take() == b"+PONG\r\n"
    assert framing.take() is None


def test_bulk_with_line_ends_in_it_is_one_reply() -> None:
    framing = Framing()
    framing.received += b"$6\r\n\r\n*9\r\n\r\n:1\r\n"
    assert framing.take() == b"$6\r\n\r\n*9\r\n\r\n"
    assert framing.take() == b":1\r\n"


def test_error_reply_is_raised_with_its_text() -> None:
    framing = Framing()
    framing.received += b"-NOSCRIPT no such script\r\n"
    with pytest.raises(WireError, match="NOSCRIPT no such script"):
        framing.take()


def test_template_is_the_command_with_values_in_its_blanks() -> None:
    template = Template(["FCALL", "100%", b"<a>", 3, b"<b>", b"<a>"], [b"<a>", b"<b>"])
    filled = template.fill({b"<a>": b"one", b"<b>": b"two"})
    assert filled == command("FCALL", "100%", "one", 3, "two", "one")


def test_names_have_one_length_and_differ() -> None:
    for name in (request_id, executor_id, router_id):
        names = [name(number) for number in range(1000)]
        assert len(set(names)) == 1000
        assert len({len(one) for one in names}) == 1


def test_percentiles_of_nothing_are_nothing() -> None:
    assert percentiles_ms([]) == (0.0, 0.0)
    assert percentiles_ms([number / 1000 for number in range(100)]) == (49.0, 98.0)


def test_connection_asks_in_the_name_of_the_url(redis_url: str) -> None:
    connection = Connection(redis_url)
    assert connection.ask("PING") == b"+PONG\r\n"
    connection.close()


def test_scheme_that_is_not_spoken_is_named() -> None:
    with pytest.raises(WireError, match="rediss:// is not supported"):
        Connection("rediss://localhost:1")


@pytest.mark.slow
@pytest.mark.parametrize("traffic", ["mixed", "plain"])
def test_small_pool_keeps_its_queue_and_has_its_figures(
    redis_url: str, capsys: pytest.CaptureFixture[str], traffic: str
) -> None:
    size = "--executors", "3", "--queued", "50", "--seats", "16", "--seconds", "0.1"
    # Another length of the queue would be an error
    assert ledger.main([*size, "--redis-url", redis_url, "--traffic", traffic]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = re.fullmatch(LAST_LINE, lines[-1])
    assert found
    assert all(float(figure) > 0 for figure in found.groups())
    for script in ("submit, seated at once", "submit, queued", "settle of 4, refilled", "cancel, queued", "report"):
        row = next(line for line in lines if line.startswith(script))
        assert all(float(figure.replace(",", "")) > 0 for figure in row.split()[-4:])
    connection = Connection(redis_url)
    assert connection.ask("KEYS", "*bench-admission*") == b"*0\r\n"
    connection.close()


def test_settle_names_ends_of_one_executor_that_has_so_many() -> None:
    template = Template(["SETTLE", *ID_MARKERS[:2]], ID_MARKERS)
    commands = Commands([], {}, {2: [[template]]}, [], [], [], [], [], [])
    traffic = Traffic(PoolScale(queued=10, executors=2, seats=2), commands, seed=1)
    for number in (1, 2, 3):
        traffic.take_events(placed(request_id(number), executor_id(number % 2)), now_s=0.0)
    assert traffic.can_settle(2)
    assert set(traffic.settle(2).ids) == {request_id(1), request_id(3)}
    assert not traffic.can_settle(2)
    with pytest.raises(TrafficError, match="no executor has 2"):
        traffic.settle(2)


def placed(placed_id: bytes, executor: bytes) -> bytes:
    return command("placed", "request_id", placed_id, "executor_id", executor, "at_ms", "1")


def test_seat_latency_is_that_of_the_call_that_freed_the_seat() -> None:
    template = Template(["SETTLE", ID_MARKERS[0]], ID_MARKERS)
    commands = Commands([], {}, {1: [[template]]}, [], [], [], [], [], [])
    traffic = Traffic(PoolScale(queued=10, executors=1, seats=2), commands, seed=1)
    for number in (1, 2):
        traffic.take_events(placed(request_id(number), executor_id(0)), now_s=0.0)
    settle = traffic.settle(1, due_s=10.0)
    traffic.forget_latencies()
    traffic.take_events(placed(request_id(3), executor_id(0)), now_s=10.5)  # by the same call, at ledger time 1
    traffic.take(settle, b"*2\r\n*2\r\n$7\r\nSETTLED\r\n:1\r\n:1\r\n", now_s=10.75)
    traffic.take_events(placed(request_id(4), executor_id(0)), now_s=11.0)
    traffic.take_events(placed(request_id(5), executor_id(0)).replace(b"\r\n1\r\n", b"\r\n2\r\n"), now_s=12.0)
    assert traffic.seat_s == [0.5, 1.0]


def test_every_executor_is_relayed_by_one_router() -> None:
    executors = [executor_id(number) for number in range(50)]
    assert sorted(one for share in shares(executors, 4) for one in share) == executors


def test_router_relays_each_report_twice_a_second_and_one_call_at_a_time() -> None:
    made: list[tuple[list[bytes], float]] = []
    now_s = 0.0

    def make(executors: Sequence[bytes]) -> Call:
        made.append((list(executors), now_s))
        return Call(CallKind.UPKEEP, b"")

    relay = Relay([b"x", b"y", b"z"], make, random.Random(1), began_s=0.0, max_per_call=2)
    upkeep = Upkeep()
    upkeep.start([(relay.next_due_s(0.0), relay)])
    while upkeep.due_s < 10.0:
        now_s = max(now_s, upkeep.due_s)
        call = upkeep.next_call(now_s)
        assert upkeep.due_s == float("inf")  # until it is answered
        now_s += 0.01
        upkeep.done(call, now_s)
    for executor in (b"x", b"y", b"z"):
        times = [at_s for relayed, at_s in made if executor in relayed]
        assert all(0.499 < later - earlier < 0.54 for earlier, later in pairwise(times))


def test_reports_that_are_relayed_late_together_are_not_due_together_afterwards() -> None:
    executors = [b"%d" % number for number in range(30)]
    relay = Relay(executors, lambda relayed: Call(CallKind.UPKEEP, b""), random.Random(1), 0.0, max_per_call=8)
    now_s = 2.7
    while relay.next_due_s(now_s) <= now_s:
        relay.make(now_s)
    calls_s = []
    while (due_s := relay.next_due_s(now_s)) < 2.7 + INTERVAL_S:
        now_s = due_s
        relay.make(now_s)
        calls_s.append(now_s)
    assert len(calls_s) >= 4
    assert all(later - earlier > 0.01 for earlier, later in pairwise(calls_s))


def test_requests_that_follow_ends_leave_the_queue_nearly_full() -> None:
    assert next_s(4000, 10_000) == MAX_NEXT_S
    assert next_s(4000, 1000) * 4000 == pytest.approx(10)
    assert next_s(4000, 10) == 0.001  # as long as between two step frames


def test_redis_that_is_not_there_is_an_error_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert ledger.main(["--redis-url", "redis://127.0.0.1:1"]) == 1
    assert "error: Redis cannot be reached" in capsys.readouterr().err
