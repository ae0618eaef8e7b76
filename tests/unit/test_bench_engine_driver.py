"""The engine alone behind its driver, with a tiny model on a CPU: every requested token arrives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from inflight.bench.peers.driver import CannotRun, Request, Setup, drive
from inflight.bench.targets.engine_driver import OwnEngine
from tests.support.checkpoints.tiny_models import save_model, sizes

FLAGS = ("--dtype", "float32", "--attention-backend", "reference", "--num-threads", "1")
FEW = (*FLAGS, "--max-num-sequences", "2", "--num-standby-sequences", "0", "--max-tokens-in-paged-kv-cache", "64")


def setup(model: str, arguments: tuple[str, ...]) -> Setup:
    return Setup(model=model, cache_folder="", seats=2, max_request_tokens=32, num_threads=1, arguments=arguments)


def test_more_requests_than_seats_and_blocks_all_get_their_tokens_in_run_after_run(tmp_path: Path) -> None:
    engine = OwnEngine(setup(str(save_model(LlamaConfig(**sizes()), tmp_path / "model")), FEW))
    try:
        for _ in range(2):
            requests = [Request(index, [5, 6, 7], 4 + index, 0.0) for index in range(6)]
            lines: list[dict[str, Any]] = []
            done = drive(engine, requests, None, lines.append)
            came = dict.fromkeys(range(6), 0)
            for line in lines:
                for request_id, number in line.get("tokens", ()):
                    came[request_id] += number
            assert came == {index: 4 + index for index in range(6)}
            assert done["figures"]["num_steps"] >= 9
            assert 0 < done["figures"]["device_busy_fraction"] <= 1
    finally:
        engine.close()


def test_flag_that_no_executor_knows_is_named() -> None:
    with pytest.raises(CannotRun, match="batching"):
        OwnEngine(setup("", ("--batching", "sometimes")))
