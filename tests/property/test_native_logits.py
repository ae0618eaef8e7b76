"""The logits stage in C++ gives the bits of the reference in every build, whatever the ids, and leaves memory alone."""

from __future__ import annotations

from ctypes import c_int64, c_void_p

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inflight.executor.cpu.logits import NativeRow
from inflight.executor.cpu.sampler import NativeSampler
from inflight.executor.engine.runner import NO_TOKEN
from inflight.executor.logits.reference import process_row
from inflight.executor.logits.row import LogitsRow, mask_of
from inflight.executor.native.library import NativeLibrary
from inflight.executor.scheduler.sequence import ALL_EXCLUDED, Processors, Sampling
from inflight.executor.step.sampling import SampleRow, name_excluded, numbers_of, sample
from inflight.executor.step.sampling_columns import SamplingBatch
from tests.support.device.native_builds import INSTRUCTION_SETS, library_of
from tests.support.examples import examples

# The first test of a build may have to wait for the compiler.
pytestmark = pytest.mark.timeout(600)

# Of vocabularies; not all are multiples of the mask's words or of the sampler's groups.
SIZES = [1, 2, 31, 32, 33, 64, 100, 333]
# Among them denormal ones, and those that a penalty takes out of float32's range.
NUMBERS = [0.0, -0.0, 1e-39, -1e-45, 3e38, float("inf"), -float("inf"), float("nan"), 1.1, -7.3]


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return library_of(request.param)


@st.composite
def processors_of(draw: st.DrawFn, size: int) -> Processors:
    """Some of the changes, with ids of the vocabulary, its first and last often among them."""
    ids = st.one_of(st.sampled_from([0, size - 1]), st.integers(0, size - 1))
    bias = draw(st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=4))
    return Processors(
        bias=tuple(bias.items()),
        allowed_ids=draw(st.one_of(st.just(frozenset()), st.frozensets(ids, max_size=40))),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7, 1e30, 1e-30])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.3, -1.7, 2.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.1, -2.0])),
        bad_words=tuple(tuple(word) for word in draw(st.lists(st.lists(ids, min_size=1, max_size=3), max_size=4))),
        no_repeat_ngram_size=draw(st.sampled_from([0, 0, 1, 2, 3, 50, 2**31])),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[LogitsRow, NDArray[np.float32]]:
    """A row and its logits."""
    size = draw(st.sampled_from(SIZES))
    # Few distinct ids, so that they repeat.
    ids = st.sampled_from(draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4)))
    prompt, output = draw(st.lists(ids, min_size=1, max_size=12)), draw(st.lists(ids, max_size=30))
    row = LogitsRow(draw(processors_of(size)), [*prompt, *output], len(prompt), len(prompt) + len(output) + 9, size)
    logits = np.random.default_rng(draw(st.integers(0, 2**32))).normal(0, 4, size).astype(np.float32)
    for place, number in draw(st.dictionaries(st.integers(0, size - 1), st.sampled_from(NUMBERS), max_size=6)).items():
        logits[place] = number
    return row, logits


def processed(
    library: NativeLibrary, row: LogitsRow, logits: NDArray[np.float32], *, touched: bool = False
) -> NDArray[np.float32]:
    """What the C++ code makes of the logits, stored or touched ones; the numbers beside them stay."""
    margin = np.float32(77)
    memory = np.concatenate([[margin], logits, [margin]]).astype(np.float32)
    native = NativeRow(row)
    call = library.calls.inflight_process_row
    call.argtypes, call.restype = (c_void_p, c_int64, c_void_p, c_int64), c_int64
    assert call(memory[1:].ctypes.data, len(logits), native.update(row), touched) == 0
    assert memory[0] == memory[-1] == margin
    return memory[1:-1]


@settings(max_examples=examples(300), deadline=None)
@given(case=cases())
@example(case=(LogitsRow(Processors(repetition_penalty=1.3), [0], 1, 4, 1), np.array([1e-39], np.float32)))
def test_results_are_the_references_bit_by_bit(
    library: NativeLibrary, case: tuple[LogitsRow, NDArray[np.float32]]
) -> None:
    row, logits = case
    expected = process_row(numbers_of(torch.from_numpy(logits)), row).numpy()
    for touched in (False, True):
        found = numbers_of(torch.from_numpy(processed(library, row, logits, touched=touched))).numpy()
        assert found.tobytes() == expected.tobytes()


def test_ids_outside_the_vocabulary_change_nothing(library: NativeLibrary) -> None:
    size, outside = 40, [40, 41, 2**31 - 1, -1, -(2**31)]
    processors = Processors(
        bias=tuple((token_id, 5.0) for token_id in outside),
        repetition_penalty=2.0,
        frequency_penalty=1.0,
        presence_penalty=1.0,
        bad_words=tuple((token_id,) for token_id in outside),
        no_repeat_ngram_size=1,
    )
    row = LogitsRow(processors, [*outside, *outside], len(outside), 20, size)
    logits = np.ones(size, np.float32)
    for touched in (False, True):
        assert processed(library, row, logits, touched=touched).tolist() == logits.tolist()
    # A mask for fewer ids allows no other
    row.mask = mask_of({3}, 32)
    assert np.flatnonzero(processed(library, row, logits) == 1).tolist() == [3]
    row.mask = mask_of({3, 39, 200}, 1000)
    assert np.flatnonzero(processed(library, row, logits) == 1).tolist() == [3, 39]


def test_row_without_an_allowed_id_is_told_from_one_without_a_number(library: NativeLibrary) -> None:
    size = 70
    words = Processors(bad_words=tuple((token_id,) for token_id in range(size)))
    rows = [None, LogitsRow(words, [1], 1, 9, size), LogitsRow(Processors(allowed_ids=frozenset({5})), [1], 1, 9, size)]
    for temperature in (0.0, 1.0):
        batch = SamplingBatch.of(
            SampleRow(Sampling(temperature, 0, 0.9, 1, 0.1), 0, banned, row)
            for row in rows
            for banned in (frozenset[int](), frozenset({5}))
        )
        logits = torch.zeros(6, size)
        logits[:, 5] = 50
        drawn = NativeSampler(library).sample(logits, batch).tolist()
        assert (drawn[0], drawn[2:]) == (5, [ALL_EXCLUDED, ALL_EXCLUDED, 5, ALL_EXCLUDED])
        assert drawn[1] >= 0
        assert drawn[1] != 5
        nothing = NativeSampler(library).sample(torch.full_like(logits, float("nan")), batch).tolist()
        assert nothing == [NO_TOKEN] * 6


def test_a_rows_structure_follows_its_ids_and_its_mask(library: NativeLibrary) -> None:
    # Given a row that goes on, and whose mask changes between steps
    row = LogitsRow(Processors(bad_words=((2, 3),)), [1], 1, 9, 40)
    sampler, logits = NativeSampler(library), torch.zeros(1, 40)
    logits[0, 3] = 9
    batch = SamplingBatch.of([SampleRow(Sampling(0.0, 0, 1.0, 0), 0, frozenset(), row)])
    assert sampler.sample(logits, batch).tolist() == [3]
    row.append(2)
    assert sampler.sample(logits, batch).tolist() == [0]
    for allowed in (8, 39):
        row.mask = mask_of({allowed}, 40)
        assert sampler.sample(logits, batch).tolist() == [allowed]
    row.mask = None
    row.append(4)
    assert sampler.sample(logits, batch).tolist() == [3]


@settings(max_examples=examples(100), deadline=None)
@given(
    case=cases(),
    sampling=st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.5, 1.0]),
        top_k=st.sampled_from([0, 1, 3, 300]),
        top_p=st.just(1.0),
        seed=st.integers(0, 2**64 - 1),
        min_p=st.sampled_from([0.0, 1e-3, 0.3, 1.0]),
    ),
    banned=st.frozensets(st.integers(0, 400), max_size=3),
)
def test_native_sampler_chooses_what_the_torch_sampler_does_after_the_stage(
    library: NativeLibrary, case: tuple[LogitsRow, NDArray[np.float32]], sampling: Sampling, banned: frozenset[int]
) -> None:
    row, numbers = case
    logits = torch.from_numpy(numbers)[None]
    sampled = SampleRow(sampling, 3, frozenset(i for i in banned if i < len(numbers)), row)
    expected = name_excluded(sample(logits, [sampled]), logits).tolist()
    sampler, before = NativeSampler(library), logits.clone()
    assert sampler.sample(logits, SamplingBatch.of([sampled])).tolist() == expected
    assert logits.numpy().tobytes() == before.numpy().tobytes(), "the caller's logits stay as they are"
    assert sampler.sample(logits, SamplingBatch.of([sampled]), may_change=True).tolist() == expected
