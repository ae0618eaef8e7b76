"""The benchmark of models with recurrent layers measures both engines."""

from __future__ import annotations

import pytest

from inflight.bench.engine.hybrid_speed import SHAPES, Case, measure
from inflight.common.model_files.recurrent import recurrent_shape
from tests.property.test_hybrid_models import CONFIGS
from tests.support.device.torch_threads import torch_threads

# The first test of a build may wait for the compiler.
pytestmark = pytest.mark.timeout(600)


def test_it_measures_prompts_and_decodes_of_both_engines() -> None:
    cases = [Case(1, 70, 3), Case(2, 20, 2)]
    with torch_threads(1):
        rows = measure(CONFIGS["lfm2-native"], cases, "float32", rounds=1)
    assert [row[:2] for row in rows] == [["1", "70"], ["2", "20"]]
    # A difference of two measurements of transformers may be below zero when the machine is busy.
    assert all(float(row[place]) > 0 for row in rows for place in (2, 3, 5))


@pytest.mark.parametrize(("name", "num_layers"), [("lfm2-350m", 10), ("qwen3.5-0.8b", 18)])
def test_its_shapes_have_the_recurrent_layers_of_the_published_models(name: str, num_layers: int) -> None:
    config = SHAPES[name]()
    shape = recurrent_shape(config.to_dict(), config.num_hidden_layers)
    assert shape is not None
    assert shape.num_layers == num_layers
