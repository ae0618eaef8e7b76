"""A short `make chaos` on the tiny model: real processes die under load, and no token is lost or comes twice."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

LAST_LINE = re.compile(r"chaos: requests=(\d+) deaths=(\d+) resumed=(\d+) lost=0 duplicated=0 leaked_blocks=0")


def test_no_token_is_lost_or_comes_twice_whatever_dies(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.chaos", "--model", "tiny", "--seconds", "16", "--seed", "5", "--copies"]
    faults = ("--faults", "executor-kill,router-kill,redis-empty,link-cut")
    folders = ("--run-dir", str(tmp_path), "--out", str(tmp_path))
    # The undisturbed streams that it compares with are made without drafts.
    drafts = ("--executor-args=--speculation=ngram",)
    ended = subprocess.run(
        [*command, *faults, *drafts, *folders], capture_output=True, text=True, timeout=250, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = LAST_LINE.fullmatch(ended.stdout.splitlines()[-1])
    assert found is not None, ended.stdout
    num_requests, num_deaths, _ = map(int, found.groups())
    assert num_requests > 20
    assert num_deaths >= 1
