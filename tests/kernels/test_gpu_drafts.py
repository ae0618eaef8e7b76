"""Drafts on the GPU runner, under Triton's interpreter: each request gets what the generic runner gives it without
drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as ReadOnlyList
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig

from inflight.executor.forward.gpu import GpuForward
from inflight.executor.gpu.graphs import Capture
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.limits import SchedulerLimits
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import Sequence
from tests.kernels import test_gpu_constrained, test_gpu_runner
from tests.kernels.test_gpu_runner import BLOCK_SIZE, LIMITS, NUM_BLOCKS, assert_same_sequences, load
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE, save_model, sizes
from tests.support.scheduler.drafting import CHEAP, GuessingProposer, eager
from tests.support.scheduler.scheduling import run_overlapped

MAKERS: Mapping[str, Callable[[], list[Sequence]]] = {
    "plain": test_gpu_runner.requests,
    "changed": test_gpu_runner.changed_requests,
    "constrained": test_gpu_constrained.requests,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Models by the kind of the requests: only one has the vocabulary of the grammars."""
    plain = save_model(LlamaConfig(**sizes(num_hidden_layers=1)), tmp_path_factory.mktemp("plain") / "tiny")
    constrained = test_gpu_constrained.write_model(tmp_path_factory.mktemp("constrained"))
    return {"plain": plain, "changed": plain, "constrained": constrained}


def check_drafts(
    folder: Path,
    kind: str,
    limits: SchedulerLimits,
    load_model: Callable[[Path, str], PagedModel],
    *,
    captures_graphs: bool,
    capture_graphs: Capture | None = None,
) -> None:
    """Asserts that requests of a kind get with drafts that are right except at every fourth position what they get
    without. Graphs are CUDA's unless `capture_graphs` is given."""
    expected = MAKERS[kind]()
    test_gpu_runner.outputs(ModelRunner(load_model(folder, "reference"), LIMITS, BLOCK_SIZE), expected, num_ahead=0)
    texts = {some.token_ids[0]: some.token_ids for some in expected}
    assert len(texts) == len(expected)

    def guess(ids: ReadOnlyList[int]) -> int:
        text = texts[ids[0]]
        right = text[len(ids)] if len(ids) < len(text) else 0
        return (right + 1) % VOCABULARY_SIZE if len(ids) % 4 == 0 else right

    drafting = eager(lambda: GuessingProposer(guess), checks_grammar=False)
    scheduler = Scheduler(limits, BlockPool(NUM_BLOCKS, BLOCK_SIZE), drafting)
    drafted = MAKERS[kind]()
    for some in drafted:
        some.max_drafts = limits.max_drafts
        assert scheduler.offer(some) is None
    model = load_model(folder, "triton")
    assert isinstance(model.forward, GpuForward)
    sizes = (model.forward.decoder, model.kv, limits, BLOCK_SIZE)
    runner = GpuRunner(*sizes, max_graph_tokens=16, capture_graphs=capture_graphs)
    if captures_graphs:
        runner.prepare()
    run_overlapped(scheduler, runner, terms=CHEAP)
    runner.close()

    scheduler.check_when_idle()
    assert_same_sequences(drafted, expected)
    assert 0 < scheduler.draft_counts.num_accepted < scheduler.draft_counts.num_verified


@pytest.mark.parametrize(("kind", "max_num_tokens"), [("plain", 14), ("changed", 48), ("constrained", 48)])
def test_tokens_do_not_depend_on_drafts(folders: Mapping[str, Path], kind: str, max_num_tokens: int) -> None:
    limits = replace(LIMITS, max_num_tokens=max_num_tokens, max_drafts=5)
    check_drafts(folders[kind], kind, limits, load, captures_graphs=False)
