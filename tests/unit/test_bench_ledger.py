"""The benchmark of the admission ledger: its wire protocol, its commands, and a small run against a real Redis."""

from __future__ import annotations

import re

import pytest

from bench.ledger import main as ledger
from bench.ledger.figures import percentiles_ms
from bench.ledger.scale import executor_id, request_id, router_id
from bench.ledger.wire import Connection, Framing, Template, WireError, encode

LAST_LINE = r"admission: queued=50 executors=3 admitted_per_s=(\d+) p50_ms=(\d+\.\d+) p99_ms=(\d+\.\d+)"
NESTED = b"*3\r\n*2\r\n$6\r\nQUEUED\r\n:7\r\n*0\r\n$-1\r\n"


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
    template = Template(["EVALSHA", "100%", b"<a>", 3, b"<b>", b"<a>"], [b"<a>", b"<b>"])
    filled = template.fill({b"<a>": b"one", b"<b>": b"two"})
    assert filled == encode(["EVALSHA", "100%", "one", 3, "two", "one"])


def test_names_have_one_length_and_differ() -> None:
    for name in (request_id, executor_id, router_id):
        names = [name(number) for number in range(1000)]
        assert len(set(names)) == 1000
        assert len({len(one) for one in names}) == 1


def test_percentiles_of_nothing_are_nothing() -> None:
    assert percentiles_ms([]) == (0.0, 0.0)
    assert percentiles_ms([number / 1000 for number in range(100)]) == (50.0, 99.0)


def test_connection_asks_in_the_name_of_the_url(redis_url: str) -> None:
    connection = Connection(redis_url)
    assert connection.ask("PING") == b"+PONG\r\n"
    connection.close()


def test_scheme_that_is_not_spoken_is_named() -> None:
    with pytest.raises(WireError, match="rediss:// is not supported"):
        Connection("rediss://localhost:1")


@pytest.mark.slow
def test_small_run_keeps_its_line_and_ends_with_its_figures(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--queued", "50", "--executors", "3", "--seats", "16", "--seconds", "0.1", "--redis-url", redis_url]
    assert ledger.main(arguments) == 0  # a line of another length at the end would be an error
    output = capsys.readouterr().out
    found = re.fullmatch(LAST_LINE, output.splitlines()[-1])
    assert found
    assert all(float(figure) > 0 for figure in found.groups())
    for script in ("submit, seated at once", "submit, queued", "settle of 4, refilled", "cancel, queued", "report"):
        line = next(line for line in output.splitlines() if line.startswith(script))
        assert all(float(figure.replace(",", "")) > 0 for figure in line.split()[-4:])
    connection = Connection(redis_url)
    assert connection.ask("KEYS", "*bench-admission*") == b"*0\r\n"
    connection.close()


def test_redis_that_is_not_there_is_an_error_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert ledger.main(["--redis-url", "redis://127.0.0.1:1"]) == 1
    assert "error: Redis cannot be reached" in capsys.readouterr().err
