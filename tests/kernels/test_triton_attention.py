"""The Triton attention kernels, under Triton's interpreter, against the reference backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inflight.executor.attention.backend import KvShape, Scoring
from inflight.executor.attention.triton import TritonAttention
from tests.kernels.comparison import (
    assert_attends_as_the_reference,
    assert_padding_changes_nothing,
    assert_rows_are_independent,
    filled,
    padded,
)
from tests.support.device.paged_cases import Spec, make_case

pytestmark = pytest.mark.usefixtures("one_seed_and_thread")

CPU = torch.device("cpu")
DECODES = (Spec(1, 1), Spec(1, 65), Spec(1, 40))
CHUNKS = (Spec(9, 9), Spec(5, 70))
VERIFICATION = (Spec(3, 90), Spec(4, 17), Spec(2, 2))


@pytest.fixture(scope="module", autouse=True)
def few_splits() -> None:
    """Leaves the splits as they are on a GPU."""


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size"),
    [(64, 1, 16), (80, 7, 32), (96, 3, 16), (128, 4, 32), (256, 16, 16), (10, 2, 48)],
)
def test_mixed_step_equals_the_reference(head_dim: int, group: int, block_size: int) -> None:
    assert_attends_as_the_reference((*DECODES, *CHUNKS), KvShape(2, head_dim), group, block_size=block_size)


@pytest.mark.parametrize(
    "scoring",
    [
        Scoring(0.3, 5),
        Scoring(0.1, 33, 2.0),
        Scoring(0.3, None, 30.0),
        Scoring(0.2, None, None, has_sinks=True),
        Scoring(0.2, 5, 20.0, has_sinks=True),
    ],
    ids=str,
)
def test_window_cap_and_sinks_equal_the_reference(scoring: Scoring) -> None:
    assert_attends_as_the_reference((*DECODES[1:], *CHUNKS), KvShape(1, 64), 2, scoring=scoring)


def test_drafts_to_verify_equal_the_reference() -> None:
    assert_attends_as_the_reference(VERIFICATION, KvShape(2, 64), 4)


@pytest.mark.parametrize("num_programs", [1, 2], ids=["whole", "two splits"])
@pytest.mark.parametrize(
    "scoring",
    [*(Scoring(0.2, window) for window in (None, 16, 300, 600)), Scoring(0.2, 300, has_sinks=True)],
    ids=str,
)
def test_decodes_of_one_and_of_many_spans_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch, num_programs: int, scoring: Scoring
) -> None:
    # Spans have 256 keys: a split has none, one or two, whole and in part
    monkeypatch.setattr("inflight.executor.kernels.tiling.MAX_PROGRAMS", num_programs)
    specs = tuple(Spec(1, context) for context in (1, 255, 256, 257, 520, 1000))
    assert_attends_as_the_reference(specs, KvShape(1, 10), 1, scoring=scoring, block_size=48)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("is_padded", [False, True], ids=["decodes", "padded"])
def test_number_of_programs_changes_no_bit_of_decodes(
    monkeypatch: pytest.MonkeyPatch, window: int | None, is_padded: bool
) -> None:
    # Given contexts of one span and of many, so that programs begin and end in the middle of them
    specs = tuple(Spec(1, context) for context in (1, 700, 20, 2100, 256, 257, 3))
    case, shape, scoring = make_case(specs, 16), KvShape(2, 16), Scoring(0.2, window)
    keys, values = torch.randn(2, case.history.num_tokens, 2, 16)
    queries = torch.randn(9, 4, 16)
    kv = filled(TritonAttention(), shape, case, keys, values, 16)
    batch = padded(case.batch, 9, 9) if is_padded else case.batch
    queries = queries[: batch.num_tokens]
    expected = TritonAttention().attend(queries, kv, batch, scoring)
    for num_programs, num_at_once in ((2, 2), (6, 4), (14, 256)):
        monkeypatch.setattr("inflight.executor.kernels.tiling.MAX_DECODE_PROGRAMS", num_programs)
        monkeypatch.setattr("inflight.executor.attention.triton.SEQUENCES_AT_ONCE", num_at_once)
        assert torch.equal(TritonAttention().attend(queries, kv, batch, scoring), expected)


def test_key_that_is_no_number_leaves_none_to_its_row_whatever_split_it_is_in() -> None:
    # Given the keys of a row in spans of 256, and two splits with and without the key
    backend, shape, case = TritonAttention(), KvShape(1, 16), make_case([Spec(1, 600), Spec(1, 300)], 16)
    keys, values = torch.randn(2, case.history.num_tokens, 1, 16)
    keys[5] = float("nan")
    outputs = backend.attend(
        torch.randn(2, 1, 16), filled(backend, shape, case, keys, values, 16), case.batch, Scoring(1)
    )
    assert outputs[0].isnan().all()
    assert outputs[1].isfinite().all()


@pytest.mark.parametrize("scoring", [Scoring(0.2), Scoring(0.2, 100), Scoring(0.2, 100, has_sinks=True)], ids=str)
@pytest.mark.parametrize(("alone", "together"), [(1, 1), (2, 40)], ids=["decodes", "chunks"])
def test_result_of_a_row_does_not_depend_on_the_batch(scoring: Scoring, alone: int, together: int) -> None:
    # Given the last tokens of sequences, each computed alone, and beside the others in larger chunks
    assert_rows_are_independent((290, 45, 600), alone, together, scoring)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    ("specs", "num_tokens", "num_sequences"),
    [
        ((*DECODES, *CHUNKS), 32, 8),
        # As many tokens as sequences, of which the device would take padding for decodes if it counted tokens alone
        ((Spec(1, 300), Spec(3, 30)), 4, 4),
        ((Spec(70, 100), Spec(33, 33)), 104, 2),
        ((Spec(1, 20), Spec(1, 33)), 16, 3),
        (VERIFICATION, 9, 5),
    ],
    ids=["mixed", "full", "chunks", "decodes", "drafts"],
)
def test_padding_changes_no_row(
    specs: tuple[Spec, ...], num_tokens: int, num_sequences: int, window: int | None
) -> None:
    assert_padding_changes_nothing(specs, num_tokens, num_sequences, Scoring(0.2, window))


def test_chunk_of_several_row_tiles_equals_the_reference() -> None:
    assert_attends_as_the_reference((Spec(1, 20), Spec(70, 100), Spec(33, 33)), KvShape(1, 64), 8)


def test_half_precision_stays_near_the_reference() -> None:
    assert_attends_as_the_reference((*DECODES, *CHUNKS), KvShape(1, 64), 4, dtype=torch.float16)


def test_strided_views_give_the_same_as_copies() -> None:
    # Given views as a model makes them: head and token swapped, keys and values slices of one tensor
    backend, shape, case = TritonAttention(), KvShape(2, 16), make_case([Spec(9, 30), Spec(1, 5)], 16)
    packed = torch.randn(case.history.num_tokens, 2, 32)
    queries = torch.randn(4, case.batch.num_tokens, 16).transpose(0, 1)
    views = (queries, packed[..., :16], packed[..., 16:])
    outputs = []
    for some_queries, some_keys, some_values in (views, tuple(view.contiguous() for view in views)):
        kv = backend.allocate(shape, case.num_blocks + 1, 16, torch.float32, CPU)
        backend.write(kv, some_keys, some_values, case.history)
        outputs.append(backend.attend(some_queries, kv, case.batch, Scoring(0.25)))
    assert torch.equal(outputs[0], outputs[1])


def test_write_leaves_other_slots_alone() -> None:
    backend, shape, case = TritonAttention(), KvShape(3, 20), make_case([Spec(3, 10)], 16)
    kv = backend.allocate(shape, case.num_blocks + 1, 16, torch.float32, CPU)
    kv.keys.fill_(7)
    keys, values = torch.randn(2, 3, 3, 20)
    batch = replace(case.batch, slot_mapping=torch.tensor([16 + 2, 5, 16 + 15]))
    backend.write(kv, keys, values, batch)
    assert torch.equal(kv.keys[1, :, 2], keys[0])
    assert torch.equal(kv.keys[0, :, 5], keys[1])
    assert torch.equal(kv.values[1, :, 15], values[2])
    assert int((kv.keys != 7).sum()) == keys.numel()
