"""Check of a model with FP8, or with quantized weights on a GPU, layer by layer.

Each layer is given the residual stream that transformers, which computes with the dequantized weights, has before it.

Errors of FP8 grow from layer to layer, differently with each prompt. Behind the last layer of SmolLM2 some logits of a
right model are further from transformers' than those of one with wrong scales, but not behind a single layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from inflight.executor.model.self_check import (
    BLOCK_SIZE,
    CHUNK_TOKENS,
    LONG_TOKENS,
    SHORT_TOKENS,
    TOLERANCE_OF_ROUTING,
    Expectation,
    SelfCheckError,
    sequences,
)
from inflight.executor.scheduler.sequence import PlanRow, StepPlan
from inflight.executor.step.batch import StepBatch, pack


@dataclass(frozen=True, slots=True)
class Tolerances:
    """The largest mean distances of a layer, and of the logits behind all layers."""

    layer: float
    logits: float

    def with_routing(self) -> Tolerances:
        """Returns those of a forward pass that chooses experts itself, in half precision. One layer chooses another
        expert for few tokens."""
        return Tolerances(self.layer + TOLERANCE_OF_ROUTING / 2, self.logits + TOLERANCE_OF_ROUTING)


# Relative distance of a layer, the mean over tokens. Measured on SmolLM2 in bfloat16 with FP8 emulated, the largest of
# all layers, for 4 pairs of random prompts: at most 0.02 without FP8, 0.05 with FP8 KV, 0.12 with FP8 weights and with
# both. With keys doubled, halved or with the scales of the token before, or values halved, it is at least 0.30.
# The same of the logits behind all layers: at most 0.45 for those prompts. Unrelated logits of the same size: 1.4.
OF_FP8 = Tolerances(0.2, 0.9)
# Of products with quantized weights, which differ from dense ones only in the order of sums. In bfloat16 logits behind
# all layers are as far as those of `self_check`.
OF_CODES = Tolerances(0.1, 0.25)


class Row(NamedTuple):
    """The positions `[start, end)` of one of the two prompts."""

    prompt: int
    start: int
    end: int


# The long prompt in two chunks, the short one in a chunk and decodes. These are rows of one step that share a block; a
# token's KV is written before any row attends.
CHUNKS = Row(0, 0, CHUNK_TOKENS), Row(1, 0, 4)
DECODES = tuple(Row(1, start, start + 1) for start in range(4, SHORT_TOKENS))
LAST_CHUNK = Row(0, CHUNK_TOKENS, LONG_TOKENS)
STEPS = CHUNKS, (*DECODES, LAST_CHUNK)
# A slot of recurrent state is that of one row.
STEPS_WITH_SLOTS = CHUNKS, (DECODES[0], LAST_CHUNK), *((row,) for row in DECODES[1:])


@dataclass(frozen=True, slots=True)
class LayerDistances:
    """The mean distance of each layer, `[layers]`, over the tokens of chunks and over those of decodes.

    That of a layer is relative to what it adds to the residual stream, and that of the last one is between logits.
    """

    chunks: Tensor
    decodes: Tensor


def compare_layers(
    expectation: Expectation,
    separate_layers: Callable[[Tensor, StepBatch], tuple[Tensor, Tensor]],
    forward: Callable[[StepBatch], Tensor],
    tolerances: Tolerances,
    *,
    has_slots: bool = False,
) -> None:
    """Raises `SelfCheckError` if a layer, or all together, yield something else than those of transformers.

    `separate_layers` is that of `GpuDecoder`; it and `forward` have blocks, and with `has_slots` slots, as for
    `self_check.compare`.
    """
    distances = layer_distances(expectation, separate_layers, STEPS_WITH_SLOTS if has_slots else STEPS)
    for kind, of_kind in (("prompts", distances.chunks), ("decodes", distances.decodes)):
        largest, layer = of_kind.max(0)
        if not largest <= tolerances.layer:
            raise SelfCheckError(
                f"the self-check failed: layer {int(layer)} does not yield in {kind} what that of transformers "
                f"does (relative distance {float(largest):.2g})"
            )
    batch = _batch(expectation, [Row(1, 0, SHORT_TOKENS)])
    logits = forward(replace(batch, logit_rows=torch.arange(SHORT_TOKENS)))
    distance = float(_logit_distances(logits, expectation.logits[1]).mean())
    if not distance <= tolerances.logits:
        raise SelfCheckError(
            f"the self-check failed: logits are not those of transformers (relative distance {distance:.2g})"
        )


def layer_distances(
    expectation: Expectation,
    separate_layers: Callable[[Tensor, StepBatch], tuple[Tensor, Tensor]],
    steps: Iterable[Iterable[Row]] = STEPS,
) -> LayerDistances:
    """Returns the distances of the layers from those of transformers."""
    assert expectation.states is not None
    of_chunks: list[Tensor] = []
    of_decodes: list[Tensor] = []
    for step in steps:
        inputs = torch.cat([expectation.states[row.prompt][:, row.start : row.end] for row in step], 1)
        expected = torch.cat([expectation.logits[row.prompt][row.start : row.end] for row in step])
        outputs, logits = separate_layers(inputs, _batch(expectation, step))
        before, after = inputs[:-1].float(), inputs[1:].float()
        differences = (outputs[:-1].float() - after).norm(dim=-1)
        # A layer whose gate is a projection of its input adds nothing to a token whose embedding is zero.
        of_layers = torch.where(differences == 0, 0.0, differences / (after - before).norm(dim=-1))
        distances = torch.cat((of_layers, _logit_distances(logits, expected)[None]))
        for row, part in zip(step, distances.split([row.end - row.start for row in step], 1), strict=True):
            (of_decodes if row.end - row.start == 1 else of_chunks).append(part)
    return LayerDistances(torch.cat(of_chunks, 1).mean(1), torch.cat(of_decodes, 1).mean(1))


def _batch(expectation: Expectation, step: Iterable[Row]) -> StepBatch:
    prompts = sequences(expectation.prompts)
    rows = [PlanRow(prompts[row.prompt], row.start, row.end - row.start, samples=True) for row in step]
    return pack(StepPlan.of(rows), BLOCK_SIZE)


def _logit_distances(logits: Tensor, expected: Tensor) -> Tensor:
    """Returns the relative distances of rows, `[T]`."""
    centred = expected - expected.mean(-1, keepdim=True)
    distances: Tensor = (logits - expected).norm(dim=-1) / centred.norm(dim=-1)
    return distances
