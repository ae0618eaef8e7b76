"""A short `make chaos` on the tiny models: real processes die under load, and no token is lost or comes twice; adapters
change under load, and no request gets the tokens of another version. And a short `make soak`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

LAST_LINE = re.compile(r"chaos: requests=(\d+) deaths=(\d+) resumed=(\d+) lost=0 duplicated=0 leaked_blocks=0")


def run_chaos(folder: Path, *options: str, model: str = "tiny") -> tuple[int, int]:
    """Runs it, and returns the numbers of requests and deaths."""
    command = [sys.executable, "-m", "inflight.bench.chaos", "--model", model, "--seed", "5", "--copies"]
    folders = ("--run-dir", str(folder), "--out", str(folder))
    ended = subprocess.run([*command, *options, *folders], capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = LAST_LINE.fullmatch(ended.stdout.splitlines()[-1])
    assert found is not None, ended.stdout
    num_requests, num_deaths, _ = map(int, found.groups())
    return num_requests, num_deaths


def test_no_token_is_lost_or_comes_twice_whatever_dies(tmp_path: Path) -> None:
    faults = ("--faults", "executor-kill,router-kill,redis-empty,link-cut")
    # The undisturbed streams that it compares with are made without drafts.
    num_requests, num_deaths = run_chaos(tmp_path, "--seconds", "16", *faults, "--executor-args=--speculation=ngram")
    assert num_requests > 20
    assert num_deaths >= 1
    costs = json.loads((tmp_path / "chaos.json").read_text(encoding="utf-8"))["costs"]
    assert costs["problems"] == []
    assert costs["tenants_ns"] > 0


def test_adapters_change_under_chaos_and_no_request_gets_another_version(tmp_path: Path) -> None:
    # Of this seed's first three faults two are of adapters and one is a death: a slow machine may come no further.
    faults = (
        *("--faults", "executor-kill,redis-empty,adapter-replace,adapter-remove,adapter-truncate"),
        *("--seed", "114"),
    )
    num_requests, num_deaths = run_chaos(tmp_path, "--seconds", "14", "--adapters", "3", *faults)
    assert num_requests > 20
    assert num_deaths >= 1
    report = json.loads((tmp_path / "chaos.json").read_text(encoding="utf-8"))
    assert report["num_adapted"] > 10
    assert sum(number for kind, number in report["faults"].items() if kind.startswith("adapter-")) >= 2


def test_no_token_of_a_model_with_recurrent_state_is_lost_or_comes_twice(tmp_path: Path) -> None:
    """With adapters that change."""
    faults = (*("--faults", "executor-kill,router-kill,redis-empty,adapter-replace"), "--adapters", "3")
    num_requests, num_deaths = run_chaos(tmp_path, "--seconds", "14", *faults, model="tiny-hybrid")
    assert num_requests > 20
    assert num_deaths >= 1


def test_short_soak_of_a_model_with_recurrent_state_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "inflight.bench.soak", "--model", "tiny-hybrid", "--seconds", "8"]
    folders = ("--run-dir", str(tmp_path), "--out", str(tmp_path))
    ended = subprocess.run([*command, *folders], capture_output=True, text=True, timeout=500, check=False)
    # It is too short to tell growth from a warm-up.
    found = re.fullmatch(r"soak: seconds=\d+ requests=(\d+) failed=0 flat=\w+", ended.stdout.splitlines()[-1])
    assert found is not None, ended.stdout + ended.stderr
    assert int(found[1]) > 10
    left = json.loads((tmp_path / "soak.json").read_text(encoding="utf-8"))["left"]
    assert set(left.values()) == {0}
