"""Engines behind their drivers, with a tiny model on a CPU: every requested token arrives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from inflight.bench.peers.driver import CannotRun, DrivenEngine, Request, Setup, drive
from inflight.bench.peers.transformers_driver import ContinuousEngine, make_engine
from inflight.bench.targets.engine_driver import OwnEngine
from tests.support.checkpoints.tiny_models import save_model, sizes

FLAGS = ("--dtype", "float32", "--attention-backend", "reference", "--num-threads", "1")
FEW = (*FLAGS, "--max-num-sequences", "2", "--num-standby-sequences", "0", "--max-tokens-in-paged-kv-cache", "64")


def setup(model: str, arguments: tuple[str, ...]) -> Setup:
    return Setup(model=model, cache_folder="", seats=2, max_request_tokens=32, num_threads=1, arguments=arguments)


def drive_twice(engine: DrivenEngine) -> list[dict[str, Any]]:
    """Sends more requests than there are seats, twice; each gets its tokens. Returns the ends of the runs."""
    ends = []
    for _ in range(2):
        requests = [Request(index, [5, 6, 7], 4 + index, 0.0) for index in range(6)]
        lines: list[dict[str, Any]] = []
        ends.append(drive(engine, requests, None, lines.append))
        came = dict.fromkeys(range(6), 0)
        for line in lines:
            for request_id, number in line.get("tokens", ()):
                came[request_id] += number
        assert came == {index: 4 + index for index in range(6)}
    return ends


def test_more_requests_than_seats_and_blocks_all_get_their_tokens_in_run_after_run(tmp_path: Path) -> None:
    engine = OwnEngine(setup(str(save_model(LlamaConfig(**sizes()), tmp_path / "model")), FEW))
    try:
        for done in drive_twice(engine):
            assert done["figures"]["num_steps"] >= 9
            assert 0 < done["figures"]["device_busy_fraction"] <= 1
    finally:
        engine.close()


@pytest.mark.parametrize("variant", ["continuous", "static"])
def test_transformers_yields_every_token(variant: str, tmp_path: Path) -> None:
    folder = str(save_model(LlamaConfig(**sizes()), tmp_path / "model"))
    engine = make_engine(replace(setup(folder, ()), variant=variant))
    drive_twice(engine)
    if isinstance(engine, ContinuousEngine):
        engine.close()


def test_flag_that_no_executor_knows_is_named() -> None:
    with pytest.raises(CannotRun, match="batching"):
        OwnEngine(setup("", ("--batching", "sometimes")))
