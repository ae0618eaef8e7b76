"""Greedy rows with changes get the tokens of rows that are stored, changed and searched as a whole."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from inflight.common.model_source import resolve_model
from inflight.executor.engine.runner import NO_TOKEN
from inflight.executor.forward.native import NativeForward
from inflight.executor.logits.row import LogitsRow
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.scheduler.sequence import ALL_EXCLUDED, Processors, Sampling
from inflight.executor.step.batch import StepBatch
from inflight.executor.step.sampling import SampleRow, name_excluded, sample
from inflight.executor.step.sampling_columns import SamplingBatch
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.device.native_builds import BEST_FIRST
from tests.support.device.paged_cases import Spec, make_case
from tests.support.device.torch_threads import torch_threads

# The first test of a build may wait for the compiler.
pytestmark = pytest.mark.timeout(600)

GREEDY = Sampling(0.0, 0, 1.0, 0)
# No multiple of a block of columns. Every id below TWINS has a twin with the same logits, TWINS ids higher.
SIZE = 1010
TWINS = 500
# More rows than a tile has, then fewer.
NUM_ROWS = (45, 45, 3, 33)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=BEST_FIRST)
def model(
    request: pytest.FixtureRequest, dtype_name: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PagedModel]:
    folder = save_model(LlamaConfig(**sizes(vocab_size=SIZE)), tmp_path_factory.mktemp("model") / "tiny")
    with_twins(folder)
    with torch_threads(2):
        loaded = load_model(
            resolve_model(str(folder)),
            dtype_name=dtype_name,
            backend_name="cpu",
            device_name="cpu",
            instructions=request.param,
        )
        assert isinstance(loaded.forward, NativeForward)
        yield loaded


def with_twins(folder: Path) -> None:
    network: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        head = network.lm_head.weight
        head[TWINS : 2 * TWINS] = head[:TWINS]
    network.save_pretrained(folder)


def decodes(model: PagedModel, num_rows: int, some: random.Random) -> StepBatch:
    """Returns a batch of sequences of two tokens, and allocates their KV."""
    case = make_case([Spec(1, 2)] * num_rows, 16)
    model.allocate_kv(case.num_blocks, 16)
    case.batch.token_ids.copy_(torch.tensor([some.randrange(SIZE) for _ in range(num_rows)]))
    return case.batch


def random_row(logits: Tensor, some: random.Random) -> SampleRow:
    """A row of which many changes touch its largest logits, so that most of them decide."""
    largest = logits.topk(12).indices.tolist()

    def ids(count: int) -> list[int]:
        return [some.choice(largest) if some.random() < 0.7 else some.randrange(SIZE) for _ in range(count)]

    def maybe(value: Any, neutral: Any) -> Any:
        return value if some.random() < 0.4 else neutral

    processors = Processors(
        bias=maybe(tuple((token_id, some.choice([some.uniform(-9, 9), -math.inf])) for token_id in set(ids(5))), ()),
        repetition_penalty=maybe(some.choice([0.5, 1.3, 1e30]), 1.0),
        frequency_penalty=maybe(some.uniform(-2, 2), 0.0),
        presence_penalty=maybe(some.uniform(-2, 2), 0.0),
        bad_words=maybe(tuple(tuple(ids(length)) for length in (1, 1, 2)), ()),
        no_repeat_ngram_size=maybe(some.choice([1, 2]), 0),
    )
    prompt, output = ids(some.randint(1, 9)), ids(some.randint(0, 9))
    row = LogitsRow(processors, [*prompt, *output], len(prompt), 40, SIZE)
    return SampleRow(GREEDY, 0, maybe(frozenset(ids(2)), frozenset()), maybe(None, row))


def expected_ids(logits: Tensor, rows: list[SampleRow]) -> list[int]:
    ids: list[int] = name_excluded(sample(logits, rows), logits).tolist()
    return ids


def test_tokens_are_those_of_whole_rows(model: PagedModel) -> None:
    some = random.Random(5)
    num_changed = 0
    for num_rows in NUM_ROWS:
        batch = decodes(model, num_rows, some)
        logits = model.logits(batch)
        for _ in range(5):
            rows = [random_row(of, some) for of in logits]
            sampling = SamplingBatch.of(rows)
            assert sampling.takes_largest

            found = model.step(batch, sampling)[0].tolist()

            assert found == expected_ids(logits, rows)
            assert found == model.choose(logits.clone(), sampling).tolist()
            num_changed += sum(a != b for a, b in zip(found, logits.argmax(-1).tolist(), strict=True))
    assert num_changed > 50, "changes decide"


def test_rows_without_a_token_say_why(model: PagedModel) -> None:
    # Given rows that exclude every token, that exclude all but one, and that only ban; some without a number
    everything = Processors(bad_words=tuple((token_id,) for token_id in range(SIZE)))
    most = Processors(bad_words=everything.bad_words[:-1])
    made = [LogitsRow(processors, [1], 1, 9, SIZE) for processors in (everything, most, Processors())]
    rows = [SampleRow(GREEDY, 0, banned, row) for row in (*made, None) for banned in (frozenset[int](), frozenset({5}))]
    num_rows = len(rows)
    batch = decodes(model, 2 * num_rows, random.Random(1))
    for kv in model.kv:
        kv.values[batch.block_tables[num_rows : 2 * num_rows, 0].long()] = math.nan
    logits = model.logits(batch)
    assert logits[num_rows:].isnan().all()
    assert not logits[:num_rows].isnan().any()

    found = model.step(batch, SamplingBatch.of([*rows, *rows]))[0].tolist()

    assert found[:4] == [ALL_EXCLUDED, ALL_EXCLUDED, SIZE - 1, SIZE - 1]
    assert found[4:num_rows] == expected_ids(logits[4:num_rows], rows[4:])
    assert found[num_rows:] == [NO_TOKEN] * num_rows


def test_masked_and_sampled_rows_are_stored_whole(model: PagedModel) -> None:
    some = random.Random(2)
    batch = decodes(model, 3, some)
    logits = model.logits(batch)
    changed = [random_row(of, some) for of in logits[:2]]
    masked = LogitsRow(Processors(allowed_ids=frozenset({9, 700})), [1], 1, 9, SIZE)
    for last in (SampleRow(GREEDY, 0, frozenset(), masked), SampleRow(Sampling(1.0, 0, 1.0, 4), 0, frozenset())):
        sampling = SamplingBatch.of([*changed, last])
        assert not sampling.takes_largest
        assert model.step(batch, sampling)[0].tolist() == expected_ids(logits, [*changed, last])


def test_changes_for_another_number_of_rows_are_refused(model: PagedModel) -> None:
    assert isinstance(model.forward, NativeForward)
    batch = decodes(model, 3, random.Random(3))
    sampling = SamplingBatch.of([SampleRow(GREEDY, 0, frozenset({1}))] * 2)
    with pytest.raises(ValueError, match="3 rows of logits for 2 rows that sample"):
        model.forward.decoder.greedy(batch, model.kv, sampling)
