"""The benchmark of processor time per token: a small run of real processes."""

from __future__ import annotations

import re

import pytest

from inflight.bench.tokens import main as tokens


@pytest.mark.slow
@pytest.mark.parametrize("through", ["router", "client"])
def test_small_run_prints_what_each_process_spends(through: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tokens.main(["--streams", "3", "--rate", "300", "--seconds", "1", "--through", through]) == 0
    line = capsys.readouterr().out
    found = re.fullmatch(
        r"tokens: through=(\w+) streams=3 rate=300.0 stops=0 interval=1 tokens_per_s=(\d+) router_us=\d+\.\d "
        r"executor_us=\d+\.\d client_us=\d+\.\d router_cores=\d+\.\d\d "
        r"tokens_per_event=\d+\.\d\d gap_p50_ms=\d+\.\d gap_p99_ms=\d+\.\d gap_max_ms=\d+\.\d gap_mean_ms=\d+\.\d\n",
        line,
    )
    assert found is not None, line
    assert found[1] == through
    assert int(found[2]) > 0
