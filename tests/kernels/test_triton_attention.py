"""The Triton attention kernels, under Triton's interpreter, against the reference backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from executor.attention.backend import KvShape, Scoring
from executor.attention.triton import TritonAttention
from tests.kernels.comparison import assert_attends_as_the_reference
from tests.paged_cases import Spec, make_case
from tests.torch_threads import torch_threads

CPU = torch.device("cpu")
DECODES = (Spec(1, 1), Spec(1, 65), Spec(1, 40))
CHUNKS = (Spec(9, 9), Spec(5, 70))
VERIFICATION = (Spec(3, 90), Spec(4, 17), Spec(2, 2))


@pytest.fixture(autouse=True)
def _one_seed_and_thread() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), torch_threads(1):
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size"),
    [(64, 1, 16), (80, 7, 32), (96, 3, 16), (128, 4, 32), (256, 16, 16), (10, 2, 48)],
)
def test_mixed_step_equals_the_reference(head_dim: int, group: int, block_size: int) -> None:
    assert_attends_as_the_reference((*DECODES, *CHUNKS), KvShape(2, head_dim), group, block_size=block_size)


@pytest.mark.parametrize("scoring", [Scoring(0.3, 5), Scoring(0.1, 33, 2.0), Scoring(0.3, None, 30.0)], ids=str)
@pytest.mark.parametrize("num_processors", [1, 8], ids=["whole", "split"])
def test_window_and_cap_equal_the_reference(scoring: Scoring, num_processors: int) -> None:
    specs = (*DECODES[1:], *CHUNKS)
    assert_attends_as_the_reference(specs, KvShape(1, 64), 2, scoring=scoring, num_processors=num_processors)


@pytest.mark.parametrize("specs", [DECODES, VERIFICATION], ids=["decode", "verification"])
def test_keys_shared_out_among_programs_give_the_same(specs: tuple[Spec, ...]) -> None:
    # Given contexts shorter than a tile, so that most of the splits are empty
    assert_attends_as_the_reference(specs, KvShape(2, 64), 4, num_processors=100)


def test_chunk_of_several_row_tiles_equals_the_reference() -> None:
    assert_attends_as_the_reference((Spec(1, 20), Spec(70, 100), Spec(33, 33)), KvShape(1, 64), 8)


def test_half_precision_stays_near_the_reference() -> None:
    assert_attends_as_the_reference((*DECODES, *CHUNKS), KvShape(1, 64), 4, dtype=torch.float16, num_processors=2)


def test_strided_views_give_the_same_as_copies() -> None:
    # Given views as a model makes them: head and token swapped, keys and values slices of one tensor
    backend, shape, case = TritonAttention(1), KvShape(2, 16), make_case([Spec(9, 30), Spec(1, 5)], 16)
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
    backend, shape, case = TritonAttention(1), KvShape(3, 20), make_case([Spec(3, 10)], 16)
    kv = backend.allocate(shape, case.num_blocks + 1, 16, torch.float32, CPU)
    kv.keys.fill_(7)
    keys, values = torch.randn(2, 3, 3, 20)
    batch = replace(case.batch, slot_mapping=torch.tensor([16 + 2, 5, 16 + 15]))
    backend.write(kv, keys, values, batch)
    assert torch.equal(kv.keys[1, :, 2], keys[0])
    assert torch.equal(kv.keys[0, :, 5], keys[1])
    assert torch.equal(kv.values[1, :, 15], values[2])
    assert int((kv.keys != 7).sum()) == keys.numel()
