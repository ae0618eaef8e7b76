"""The command line of the benchmark, and the stacks that it asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.options import parse_options
from bench.stacks import stack_options
from bench.workloads import build_workload


def test_defaults_compare_both_modes_on_mixed() -> None:
    options = parse_options([])
    assert (options.workloads, options.modes, options.rounds, options.seats) == (
        ("mixed",),
        ("inflight", "static"),
        2,
        8,
    )


def test_lists_are_split_at_commas() -> None:
    options = parse_options(["--workload", "short, long", "--modes", "static", "--out", "elsewhere"])
    assert (options.workloads, options.modes, options.out) == (("short", "long"), ("static",), Path("elsewhere"))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--workload", "huge"], "argument --workload: 'huge' is not one of mixed, short, long, prefill, chat"),
        (["--modes", "dynamic"], "argument --modes: 'dynamic' is not one of inflight, static"),
        (["--scale", "0"], "argument --scale: '0' is not a number in (0, 1]"),
        (["--scale", "nan"], "argument --scale: 'nan' is not a number in (0, 1]"),
        (["--rounds", "0"], "argument --rounds: '0' is not a whole number of at least 1"),
        (["--workload", "short,long", "--name", "both"], "argument --name: one name cannot stand for several"),
    ],
)
def test_wrong_option_is_named(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(argv)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_stacks_differ_in_the_mode_alone_and_hold_every_seat() -> None:
    options = parse_options(["--seats", "16", "--workload", "mixed,long"])
    inflight, static = (stack_options(options, mode) for mode in options.modes)
    flags = dict(zip(inflight.executor_args[::2], inflight.executor_args[1::2], strict=True))
    longest = max(build_workload(name, vocabulary_size=10).max_request_tokens for name in options.workloads)
    assert flags["--batching"] == "inflight"
    assert int(flags["--max-tokens-in-paged-kv-cache"]) >= 16 * longest
    assert tuple("static" if arg == "inflight" else arg for arg in inflight.executor_args) == static.executor_args
    assert inflight.run_dir != static.run_dir
