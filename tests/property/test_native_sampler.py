"""The C++ sampler yields the torch sampler's tokens in every build, and they do not depend on the other rows."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inflight.executor.cpu.sampler import NativeSampler
from inflight.executor.native.pool import NativePool
from inflight.executor.scheduler.sequence import Sampling
from inflight.executor.step.sampling import SampleRow, sample
from inflight.executor.step.sampling_columns import SamplingBatch
from tests.support.device.native_builds import INSTRUCTION_SETS, library_of
from tests.support.device.sampling_oracle import is_right
from tests.support.examples import examples

# The first test of a build may have to wait for the compiler.
pytestmark = pytest.mark.timeout(600)

SIZES = [1, 3, 63, 64, 65, 300, 5000]

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.01, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 50, 299, 300, 5000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1 - 1e-12, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    min_p=st.sampled_from([0.0, 0.0, 1e-9, 0.02, 0.5, 1.0]),
)
rows = st.builds(SampleRow, samplings, st.integers(0, 2**31), st.frozensets(st.integers(0, 299), max_size=3))


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def native(request: pytest.FixtureRequest) -> NativeSampler:
    return NativeSampler(library_of(request.param))


def drawn(native: NativeSampler, logits: Tensor, row: SampleRow) -> int:
    """The one token of one row."""
    return int(native.sample(logits[None], SamplingBatch.of([row])))


def row_logits(seed: int, size: int, shape: str) -> Tensor:
    normal = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    match shape:
        case "peaked":
            return normal * 6
        case "flat":
            return normal * 1e-3
        case "equal":
            return torch.zeros(size)
        case "partly banned":
            return torch.where(normal > 0.5, normal, float("-inf"))
        case _:
            return (normal * 8).round() / 4  # few distinct values, so that ties are common


logits_of_rows = st.builds(
    row_logits,
    st.integers(0, 2**32),
    st.sampled_from(SIZES),
    st.sampled_from(["peaked", "flat", "equal", "partly banned", "ties"]),
)


def within(row: SampleRow, vocabulary_size: int) -> SampleRow:
    """The row, banning only ids that there are."""
    return SampleRow(row.sampling, row.output_index, frozenset(i for i in row.banned_ids if i < vocabulary_size))


@settings(max_examples=examples(200), deadline=None)
@given(row=rows, logits=logits_of_rows)
def test_native_sampler_chooses_what_the_torch_sampler_does(
    native: NativeSampler, row: SampleRow, logits: Tensor
) -> None:
    row, before = within(row, logits.shape[0]), logits.clone()
    expected, token_id = int(sample(logits[None], [row])), drawn(native, logits, row)
    has_choice = bool((logits > float("-inf"))[sorted(set(range(logits.shape[0])) - row.banned_ids)].any())
    assert token_id == expected or not has_choice or is_right(logits, row, token_id)
    assert torch.equal(logits, before), "the caller's logits stay as they are"


@settings(max_examples=examples(50), deadline=None)
@given(
    batch=st.lists(st.tuples(rows, st.integers(0, 2**32)), min_size=1, max_size=9),
    order=st.randoms(use_true_random=False),
)
def test_a_row_gives_the_same_token_alone_and_in_any_company(
    native: NativeSampler, batch: list[tuple[SampleRow, int]], order: random.Random
) -> None:
    shuffled = [(row, row_logits(seed, 300, "ties")) for row, seed in batch]
    order.shuffle(shuffled)
    logits = torch.stack([logits for _, logits in shuffled])
    together = native.sample(logits, SamplingBatch.of(row for row, _ in shuffled)).tolist()
    alone = [drawn(native, logits, row) for row, logits in shuffled]
    assert together == alone


def test_builds_for_all_processors_choose_the_same_on_any_number_of_threads() -> None:
    # top_p is not among them: how exponentials are added up differs with the width of a vector
    logits = torch.randn(60, 3000, generator=torch.Generator().manual_seed(1))
    some = [
        SampleRow(Sampling(0.2 + i / 30, 0 if i % 2 else i + 1, 1.0, seed=i), output_index=i, banned_ids=frozenset())
        for i in range(60)
    ]
    chosen = []
    for instructions in INSTRUCTION_SETS:
        library = library_of(instructions)
        for pool in (None, NativePool(library, 3)):
            chosen.append(NativeSampler(library, pool).sample(logits, SamplingBatch.of(some)).tolist())
    assert all(ids == chosen[0] for ids in chosen)


def test_oracle_refuses_the_second_best() -> None:
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    for i in range(40):
        sampling = Sampling(0.5 + i / 40, i % 3 * 100, 1 - i % 2 * 0.1, seed=i)
        best = int(sample(logits[None], [SampleRow(sampling, i, frozenset())]))
        second = int(sample(logits[None], [SampleRow(sampling, i, frozenset({best}))]))
        assert is_right(logits, SampleRow(sampling, i, frozenset()), best)
        assert not is_right(logits, SampleRow(sampling, i, frozenset()), second)
