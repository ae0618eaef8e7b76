"""Layers with a sliding window that keep only their window on a GPU, under Triton's interpreter: the tokens are those
of one KV pool for all layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inflight.common.kv_size import WindowSize
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.gpu.table_entries import TableFollower
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.limits import KvWindow
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import PlanRow, Sampling, Sequence, StepPlan
from tests.kernels.test_gpu_graphs import Captured
from tests.kernels.test_gpu_runner import BLOCK_SIZE, LIMITS, NUM_BLOCKS, load, outputs, sequence
from tests.support.checkpoints.gpt_oss import WINDOW, save_gpt_oss
from tests.support.device.paged_cases import make_sequence

SIZE = WindowSize(WINDOW, LIMITS.max_num_tokens, LIMITS.context_length, 0, BLOCK_SIZE)
# As small as it may be, so that blocks are soon used again.
KV_WINDOW = KvWindow(WINDOW, SIZE.num_blocks(3), SIZE.num_sequences(3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gpt_oss(tmp_path_factory.mktemp("windows") / "gpt-oss")


def requests() -> list[Sequence]:
    """Prompts of several windows, two of which share their beginning, and one within a window."""
    greedy = Sampling(0.0, 0, 1.0, 0)
    made = [sequence(0, 50, greedy), sequence(1, 3, greedy), sequence(2, 54, Sampling(0.9, 20, 0.9, 7))]
    made[2].token_ids[:48] = made[0].token_ids[:48]
    for some in made:
        some.num_reserved_blocks = 4
    return made


def test_tokens_are_those_of_one_pool(folder: Path) -> None:
    results = []
    # Given steps that are launched with one pool, and captured with two
    for window in (None, KV_WINDOW):
        limits = replace(LIMITS, kv_window=window)
        model = load(folder, "triton")
        model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE, None if window is None else window.num_blocks)
        assert isinstance(model.forward, GpuForward)
        options: dict[str, Any] = {} if window is None else {"max_graph_tokens": 16, "capture_graphs": Captured({})}
        runner = GpuRunner(model.forward.decoder, model.kv, limits, BLOCK_SIZE, **options)
        if window is not None:
            runner.prepare()
        for kv in model.kv:
            # Dummy steps read the spare block.
            kv.keys[1:].fill_(float("nan"))
        scheduler = Scheduler(limits, BlockPool(NUM_BLOCKS, BLOCK_SIZE))
        results.append(outputs(runner, requests(), scheduler))
    assert results[0] == results[1]
    assert model.kv[0].num_blocks < model.kv[1].num_blocks
    assert model.forward.has_window_pools


def test_entries_before_the_window_are_not_sent() -> None:
    # Given a sequence that boards behind a prefix, whose window begins in its third block
    follower = TableFollower(2, 8, first_window_row=3)
    some = make_sequence(list(range(60)), [5, 6, 7, 8])
    scheduler = Scheduler(replace(LIMITS, kv_window=KV_WINDOW), BlockPool(NUM_BLOCKS, BLOCK_SIZE))
    assert scheduler.windows is not None
    some.window_table = scheduler.windows.open()
    some.seat, some.window_table.first = 1, 2
    some.window_table.blocks.append(3)
    plan = replace(StepPlan.of([PlanRow(some, 40, 8, False)]), boarded=(some,))
    # When it is followed, and its window grows
    entries = follower.follow(plan)
    assert dict(zip(entries.places.tolist(), entries.blocks.tolist(), strict=True)) == {
        8: 5, 9: 6, 10: 7, 11: 8, 4 * 8 + 2: 3,
    }  # fmt: skip
    follower.sent()
    some.window_table.blocks.append(1)
    entries = follower.follow(replace(plan, boarded=(), grown=(some,)))
    assert dict(zip(entries.places.tolist(), entries.blocks.tolist(), strict=True)) == {4 * 8 + 3: 1}
