"""Chunks by FlashInfer: its index arrays, its results through a stand-in, and the choice."""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from inflight.common.model_source import ModelError
from inflight.executor.attention.backend import KvShape, LayerKv, Scoring
from inflight.executor.attention.choice import choose_backend
from inflight.executor.attention.flashinfer import (
    RING,
    ChunkIndices,
    FlashInfer,
    Heads,
    Timing,
    decide,
    open_flashinfer,
    unsupported_reason,
)
from inflight.executor.attention.reference import ReferenceAttention
from inflight.executor.step.batch import StepBatch
from tests.support.device.flashinfer_stand_in import SIGNATURES, VERSION, BatchPrefillWithPagedKVCacheWrapper
from tests.support.device.paged_cases import Spec, make_case

CPU = torch.device("cpu")
HEADS = Heads(8, KvShape(2, 64), [Scoring(0.125)])
MIXED = (Spec(1, 40), Spec(1, 1), Spec(5, 5), Spec(7, 32), Spec(3, 50), Spec(20, 33))
SCORINGS = (Scoring(0.125), Scoring(0.2, 1), Scoring(0.1, 17), Scoring(0.3, 20, 2.0), Scoring(0.3, None, 5.0))


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceDecodes:
    """Decodes by the reference over its own copy of the KV."""

    kv: LayerKv

    def attend_decodes(self, queries: Tensor, kv: LayerKv, batch: StepBatch, scoring: Scoring, outputs: Tensor) -> None:
        attended = ReferenceAttention().attend(queries, self.kv, batch, scoring)
        outputs[: batch.num_decodes] = attended[: batch.num_decodes]


class NoDecodes:
    def attend_decodes(self, *_: object) -> None:
        raise AssertionError("no test of these has decodes")


def filled(kv: LayerKv, block_size: int) -> LayerKv:
    """The reference's KV in the layout of the Triton kernels."""
    keys, values = (part.unflatten(0, (-1, block_size)).transpose(1, 2).contiguous() for part in (kv.keys, kv.values))
    return LayerKv(kv.shape, keys, values, kv.num_blocks)


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("group", [1, 4])
def test_planned_attention_equals_the_reference(block_size: int, group: int) -> None:
    torch.manual_seed(0)
    case = make_case(MIXED, block_size)
    shape, reference = KvShape(2, 64), ReferenceAttention()
    kv = reference.allocate(shape, case.num_blocks + 1, block_size, torch.float32, CPU)
    # What no token was written to must not be read.
    kv.keys.fill_(float("nan"))
    kv.values.fill_(float("nan"))
    keys, values = torch.randn(2, case.history.num_tokens, 2, 64)
    reference.write(kv, keys, values, case.history)
    queries = torch.randn(case.batch.num_tokens, 2 * group, 64)
    heads = Heads(2 * group, shape, SCORINGS)
    chosen = FlashInfer(BatchPrefillWithPagedKVCacheWrapper, heads, torch.float32, CPU, ReferenceDecodes(kv))
    attention = chosen.plan(case.batch)
    assert attention is not None
    for scoring in SCORINGS:
        found = attention.attend(queries, filled(kv, block_size), case.batch, scoring)
        torch.testing.assert_close(found, reference.attend(queries, kv, case.batch, scoring), rtol=0, atol=2e-5)


def test_indices_are_those_of_the_chunks_alone() -> None:
    specs = (Spec(1, 17), Spec(5, 5), Spec(7, 32), Spec(3, 33))
    case = make_case(specs, 16)
    indices = ChunkIndices.of(case.batch)
    tables = case.batch.block_tables.numpy()
    assert indices.query_starts.tolist() == [0, 5, 12, 15]
    assert indices.block_starts.tolist() == [0, 1, 3, 6]
    assert indices.last_block_tokens.tolist() == [5, 16, 1]
    assert indices.blocks.tolist() == [*tables[1, :1], *tables[2, :2], *tables[3, :3]]


def test_empty_sequence_has_no_blocks() -> None:
    batch = make_case((Spec(4, 4), Spec(2, 20)), 16).batch
    empty = replace(
        batch,
        query_starts=torch.tensor([0, 4, 4, 6], dtype=torch.int32),
        context_lengths=torch.tensor([4, 0, 20], dtype=torch.int32),
        table_rows=torch.tensor([0, 0, 1], dtype=torch.int32),
    )
    indices = ChunkIndices.of(empty)
    assert indices.query_starts.tolist() == [0, 4, 4, 6]
    assert indices.block_starts.tolist() == [0, 1, 1, 3]
    assert indices.last_block_tokens.tolist() == [4, 0, 4]


def test_step_of_decodes_is_not_planned() -> None:
    chosen = FlashInfer(BatchPrefillWithPagedKVCacheWrapper, HEADS, torch.float32, CPU, NoDecodes())
    assert chosen.plan(make_case((Spec(1, 4), Spec(1, 20)), 16).batch) is None


def test_plans_in_flight_keep_their_own_wrappers() -> None:
    chosen = FlashInfer(BatchPrefillWithPagedKVCacheWrapper, HEADS, torch.float32, CPU, NoDecodes())
    batch = make_case((Spec(4, 4),), 16).batch
    plans: list[Any] = [chosen.plan(batch) for _ in range(RING + 1)]
    wrappers = [plan.wrappers[HEADS.scorings[0]] for plan in plans]
    assert len(set(map(id, wrappers))) == RING
    assert wrappers[0] is wrappers[RING]


FASTER, SLOWER = Timing(512, 512, (3.0, 2.0, 9.0), (1.0, 2.0, 1.0)), Timing(512, 2048, (1.0,), (1.0,))


@pytest.mark.parametrize(
    ("timings", "is_required", "is_used"),
    [((FASTER,), False, True), ((FASTER, SLOWER), False, False), ((SLOWER,), True, True)],
)
def test_it_must_be_faster_at_every_size_unless_it_is_required(
    timings: tuple[Timing, ...], is_required: bool, is_used: bool
) -> None:
    verdict = decide(None, timings, is_required=is_required)
    assert verdict.is_used is is_used
    assert not verdict.is_warning
    for timing in timings:
        assert str(timing) in verdict.reason, "both times are told"
    assert str(FASTER) == "1000.00 ms for 512 tokens of 512, 3000.00 ms with triton"


def test_wrong_results_are_a_warning_or_with_a_requirement_an_error() -> None:
    verdict = decide("its logits differ by 3", [], is_required=False)
    assert not verdict.is_used
    assert verdict.is_warning
    assert "its logits differ by 3" in verdict.reason
    with pytest.raises(ModelError, match="attention backend 'flashinfer' cannot be used: its logits differ by 3"):
        decide("its logits differ by 3", [], is_required=True)


BFLOAT16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("heads", "dtype", "kv_dtypes", "reason"),
    [
        (None, BFLOAT16, [BFLOAT16], "fused forward pass"),
        (HEADS, torch.float32, [torch.float32], "not torch.float32"),
        (HEADS, BFLOAT16, [BFLOAT16, FP8], "quantized KV"),
        (replace(HEADS, kv=KvShape(2, 80)), BFLOAT16, [BFLOAT16], "not 80"),
        (HEADS, BFLOAT16, [BFLOAT16], None),
    ],
)
def test_models_that_it_cannot_compute(
    heads: Heads | None, dtype: torch.dtype, kv_dtypes: list[torch.dtype], reason: str | None
) -> None:
    found = unsupported_reason(heads, dtype, kv_dtypes)
    assert found is None if reason is None else reason in str(found)


class Decoding(ReferenceAttention):
    def attend_decodes(self, *_: object) -> None:
        raise AssertionError("nothing is computed here")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)


@pytest.mark.usefixtures("missing")
def test_missing_package_is_named_if_it_is_required() -> None:
    arguments = (HEADS, BFLOAT16, [BFLOAT16], torch.device("cuda"), Decoding())
    assert open_flashinfer("auto", *arguments) is None
    message = r"flashinfer-python is not installed \(pip install 'inflight\[flashinfer\]'\)"
    with pytest.raises(ModelError, match=message):
        open_flashinfer("flashinfer", *arguments)
    with pytest.raises(ModelError, match=message):
        choose_backend("flashinfer", CPU, BFLOAT16)


@pytest.mark.usefixtures("installed")
def test_it_is_opened_where_it_can_run_and_only_if_the_setting_asks_for_it() -> None:
    arguments = (HEADS, BFLOAT16, [BFLOAT16], CPU)
    opened = open_flashinfer("flashinfer", *arguments, Decoding())
    assert opened is not None
    assert opened.is_required
    assert open_flashinfer("auto", *arguments, Decoding()) is None, "auto has a use for it on a GPU only"
    assert open_flashinfer("triton", *arguments, Decoding()) is None
    with pytest.raises(ModelError, match="quantized KV"):
        open_flashinfer("flashinfer", HEADS, BFLOAT16, [FP8], CPU, Decoding())
    with pytest.raises(ModelError, match="fused forward pass"):
        open_flashinfer("flashinfer", *arguments, ReferenceAttention())


@pytest.mark.parametrize("method", ["__init__", "plan", "run"])
def test_installed_package_has_the_recorded_signatures(method: str) -> None:
    pytest.importorskip("flashinfer", reason=f"the signatures recorded from flashinfer-python {VERSION} are used")
    real = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    found = list(inspect.signature(getattr(real, method)).parameters.values())[1:]
    recorded = list(SIGNATURES[method].parameters.values())
    by_place = [p.name for p in recorded if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert [parameter.name for parameter in found][: len(by_place)] == by_place
    assert {parameter.name for parameter in recorded} <= {parameter.name for parameter in found}
