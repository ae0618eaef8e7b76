"""The check of layers with FP8: it refuses one that differs, and says which."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inflight.common.model_source import ModelError
from inflight.executor.model.layer_check import OF_FP8, compare_layers, layer_distances
from inflight.executor.model.self_check import LONG_TOKENS, SHORT_TOKENS, Expectation
from inflight.executor.step.batch import StepBatch

NUM_LAYERS, HIDDEN, VOCABULARY = 4, 32, 64


class Model:
    """Layers that yield what is expected, with an `error` in `layer` relative to what each token's layer adds."""

    def __init__(self, *, layer: int = 0, error: float = 0.0, only_decodes: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        long, short = (
            torch.randn(NUM_LAYERS, size, HIDDEN, generator=generator).cumsum(0) for size in (LONG_TOKENS, SHORT_TOKENS)
        )
        logits = torch.randn(LONG_TOKENS + SHORT_TOKENS, VOCABULARY, generator=generator)
        prompts = list(range(LONG_TOKENS)), list(range(LONG_TOKENS, LONG_TOKENS + SHORT_TOKENS))
        self.expectation = Expectation(prompts, (logits[:LONG_TOKENS], logits[LONG_TOKENS:]), states=(long, short))
        self._logits, self._states = logits, torch.cat((long, short), 1)
        self._layer, self._error, self._only_decodes = layer, error, only_decodes

    def separate_layers(self, inputs: Tensor, batch: StepBatch) -> tuple[Tensor, Tensor]:
        # The token ids are places in `_states`.
        assert torch.equal(inputs, self._states[:, batch.token_ids])
        outputs, logits = torch.cat((inputs[1:], inputs[-1:])), self._logits[batch.token_ids].clone()
        wrong = torch.arange(batch.num_tokens) < batch.num_decodes if self._only_decodes else slice(None)
        if self._layer == NUM_LAYERS - 1:
            logits[wrong] += self._error * (logits[wrong] - logits[wrong].mean(-1, keepdim=True))
        else:
            added = inputs[self._layer + 1] - inputs[self._layer]
            outputs[self._layer, wrong] += self._error * added[wrong]
        return outputs, logits

    def forward(self, batch: StepBatch) -> Tensor:
        return self._logits[batch.token_ids]


def test_right_model_has_no_distance() -> None:
    model = Model()
    distances = layer_distances(model.expectation, model.separate_layers)
    assert torch.equal(distances.chunks, torch.zeros(NUM_LAYERS))
    assert torch.equal(distances.decodes, torch.zeros(NUM_LAYERS))
    compare_layers(model.expectation, model.separate_layers, model.forward, OF_FP8)


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("only_decodes", [False, True])
def test_single_wrong_layer_is_named(layer: int, only_decodes: bool) -> None:
    passing, failing = (
        Model(layer=layer, error=factor * OF_FP8.layer, only_decodes=only_decodes) for factor in (0.9, 1.1)
    )
    compare_layers(passing.expectation, passing.separate_layers, passing.forward, OF_FP8)
    with pytest.raises(ModelError, match=f"self-check failed: layer {layer} does not yield"):
        compare_layers(failing.expectation, failing.separate_layers, failing.forward, OF_FP8)


def test_layers_that_yield_no_number_are_refused() -> None:
    model = Model(layer=1, error=float("nan"))
    with pytest.raises(ModelError, match="relative distance nan"):
        compare_layers(model.expectation, model.separate_layers, model.forward, OF_FP8)


def test_right_layers_in_a_wrong_model_are_refused() -> None:
    model = Model()
    with pytest.raises(ModelError, match="self-check failed: logits are not those of transformers"):
        compare_layers(model.expectation, model.separate_layers, lambda batch: model.forward(batch).roll(1, 0), OF_FP8)
