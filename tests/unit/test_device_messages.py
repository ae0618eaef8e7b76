"""What the leader of a GPU forward pass tells other ranks arrives as it was sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from inflight.executor.engine.runner import StepSizes
from inflight.executor.gpu.device_step import StepForm
from inflight.executor.gpu.graphs import Bucket
from inflight.executor.gpu.runner import FollowedStep, needs_logits
from inflight.executor.gpu.step_layout import StepLayout
from inflight.executor.parallel.device_messages import (
    pack_launch,
    pack_sizes,
    pack_upload,
    unpack_launch,
    unpack_sizes,
    unpack_upload,
)
from inflight.executor.scheduler.limits import Batching, SchedulerLimits
from inflight.executor.scheduler.sequence import Sampling
from inflight.executor.step.sampling import SampleRow
from inflight.executor.step.sampling_columns import SamplingBatch

GREEDY = Sampling(0.0, 0, 1.0, 0)


@pytest.mark.parametrize(
    "form",
    [
        StepForm(StepLayout(7, 3, 2, 1), 2),
        StepForm(StepLayout.of_decodes(4), 4, Bucket.of_decodes(4)),
        StepForm(StepLayout(16, 4, 2, 0, 0, is_padded=True), 4, Bucket(16, 4, False)),
    ],
)
@pytest.mark.parametrize("flags", [(True, False), (False, True)])
def test_step_arrives_as_it_was_sent(form: StepForm, flags: tuple[bool, bool]) -> None:
    step = FollowedStep(form, 3, *flags)
    assert unpack_launch(pack_launch(step)) == step


def test_words_arrive_as_they_were_sent() -> None:
    words = np.array([5, -1, 2**31 - 1], np.int32)
    found, *entries = unpack_upload(pack_upload(words, 2, 1))
    assert found.tolist() == words.tolist()
    assert entries == [2, 1]


def test_runners_of_all_ranks_have_the_same_limits() -> None:
    limits = SchedulerLimits(3, 8, 64, 100, enable_chunked_context=False, batching=Batching.STATIC,
                             enable_prefix_cache=True)  # fmt: skip
    sizes = unpack_sizes(pack_sizes(StepSizes(limits, 16, uses_graphs=True, max_graph_tokens=32)))
    assert (sizes.block_size, sizes.uses_graphs, sizes.max_graph_tokens) == (16, True, 32)
    for name in ("num_seat_rows", "max_step_tokens", "max_num_yields", "max_num_tokens", "context_length"):
        assert getattr(sizes.limits, name) == getattr(limits, name), name


@pytest.mark.parametrize(
    ("sampling", "changes", "expected"),
    [
        (GREEDY, {}, False),
        (replace(GREEDY, top_k=5), {}, False),
        (Sampling(1.0, 0, 1.0, 7), {}, False),
        (Sampling(1.0, 5, 1.0, 7), {}, True),
        (Sampling(1.0, 0, 0.9, 7), {}, True),
        (Sampling(1.0, 0, 1.0, 7, min_p=0.1), {}, True),
        (GREEDY, {"banned_ids": frozenset({1})}, True),
    ],
)
def test_ranks_gather_logits_for_rows_that_need_all_of_them(
    sampling: Sampling, changes: dict[str, Any], expected: bool
) -> None:
    rows = [SampleRow(GREEDY, 0, frozenset()), SampleRow(sampling, 0, **{"banned_ids": frozenset()} | changes)]
    assert needs_logits(SamplingBatch.of(rows)) is expected
    assert needs_logits(replace(SamplingBatch.of(rows), reporting=((0, 1),)))
