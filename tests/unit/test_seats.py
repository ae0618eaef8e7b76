"""The number of an executor's seats: from the size of its KV cache, unless the setting gives it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from transformers import LlamaConfig

from inflight.common.kv_size import default_step_tokens, most_seats, num_seats
from inflight.executor.loader import load_executor
from inflight.executor.main import identity
from inflight.executor.settings import ExecutorSettings
from tests.support.checkpoints.tiny_models import save_model, sizes

CONTEXT = 64


@pytest.mark.parametrize(
    ("num_blocks", "context_length", "seats"),
    [
        (640, 8192, 10),
        (639, 8192, 9),
        (64, 512, 8),
        (64 * 12, 512, 24),
        (1, 8192, 8),
        (1_000_000, 8192, 64),
    ],
)
def test_seats_are_one_for_each_1024_tokens_or_context_within_bounds(
    num_blocks: int, context_length: int, seats: int
) -> None:
    assert num_seats(num_blocks, 16, context_length, most=64) == seats


def test_most_seats_depend_on_the_device_and_the_token_budget() -> None:
    small, large = 24 << 30, 80 << 30
    assert [most_seats(gpu_bytes, 8192) for gpu_bytes in (0, small, large)] == [64, 256, 1024]
    assert [default_step_tokens(gpu_bytes) for gpu_bytes in (0, small, large)] == [1024, 1024, 8192]
    assert (most_seats(small, 100), most_seats(large, 100)) == (100, 100)
    assert num_seats(1, 16, 8192, most_seats(0, 4)) == 4


@pytest.mark.parametrize(
    ("changes", "seats", "standby"),
    [
        ({}, 20, 3),
        ({"batching": "static"}, 20, 20),
        ({"max_num_tokens": 16}, 16, 3),
        ({"max_num_sequences": 5}, 5, 3),
    ],
)
def test_executor_logs_and_announces_its_seats(
    changes: dict[str, object], seats: int, standby: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a KV cache for 20 whole contexts
    settings = ExecutorSettings(
        model=str(save_model(LlamaConfig(**sizes(max_position_embeddings=CONTEXT)), tmp_path / "model")),
        dtype="float32",
        attention_backend="reference",
        num_threads=1,
        num_standby_sequences=3,
        max_tokens_in_paged_kv_cache=20 * CONTEXT,
        **changes,  # type: ignore[arg-type]
    )
    # When the model is loaded
    with caplog.at_level(logging.INFO):
        loaded = load_executor(settings)
    # Then the chosen number is in the log and in what routers are told
    described = identity(settings, loaded).description
    assert (described.max_num_sequences, described.num_standby_sequences) == (seats, standby)
    origin = "" if "max_num_sequences" in changes else " (from the size of the KV cache)"
    assert f"{seats} seats{origin}, " in caplog.text
