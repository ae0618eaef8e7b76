"""Self-check of a loaded model: its logits with paged attention are compared with transformers' eager forward pass.

In half precision they must be near those of transformers in that dtype or in float32. Both sides round, and with large
activations transformers may be further from float32 than we are.

Two short random prompts are computed twice: one by one with transformers' plain attention, and together with paged
attention, the longer one in two chunks, the second of which shares its step with a decode of the other. That covers
every kind of row in a step. Both computations have the same weights, so weights that were read wrongly are not seen
here: `inflight.executor.formats` refuses them by the names of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from inflight.common.model_source import ModelError
from inflight.executor.checkpoint.quiet import quiet_transformers
from inflight.executor.recurrent.network import mixing_layers
from inflight.executor.scheduler.sequence import PlanRow, Sampling, Sequence, StepPlan, Stopping
from inflight.executor.step.batch import StepBatch, pack

BLOCK_SIZE = 16
NUM_BLOCKS = 3
NUM_SLOTS = 2
LONG_TOKENS = 21
CHUNK_TOKENS = 13
SHORT_TOKENS = 10
# Relative distance of logits. Measured on SmolLM2 with a reference of the same dtype: 6e-6 in float32, 0.09 in bfloat16
# (rounding of 30 layers); with scores scaled by 1.1 instead of 1 it is 0.29 and 0.34, without part of the context 3.
TOLERANCE = {torch.float32: 1e-3}
HALVES = (torch.bfloat16, torch.float16)
NUMBERS_AT_ONCE = 1 << 26  # of a weight in float32
TOLERANCE_OF_HALF = 0.25
# Weights and activations are rounded to int8.
TOLERANCE_OF_PRODUCTS = 0.5
# Rounding of keys and values is added. Measured on SmolLM2 in float32: 0.04 for int8. FP8 is compared here only where
# transformers computes the layers (`layer_check`): emulated in bfloat16, at most 0.24 for 4 pairs of random prompts.
# With the scales of the token before, keys doubled or values halved, no pair was below 1.06.
TOLERANCE_OF_KV = {torch.int8: 0.15, torch.float8_e4m3fn: 0.45}
# Rounding makes routers choose other experts where two are nearly equal. Measured on a model of 2 layers: 0.29.
TOLERANCE_OF_ROUTING = 0.25


class SelfCheckError(ModelError):
    """Logits that are not those of transformers."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """Two prompts and their logits by transformers, `[tokens, vocabulary]`; in half precision also those in float32,
    `exact`. Where layers are compared one by one, `states` are the residual streams before each, `[layers, tokens,
    hidden]`, without those that are a feed-forward layer alone."""

    prompts: tuple[list[int], list[int]]
    logits: tuple[Tensor, Tensor]
    exact: tuple[Tensor, Tensor] | None = None
    states: tuple[Tensor, Tensor] | None = None


def expect(network: PreTrainedModel, vocabulary_size: int, *, has_states: bool = False) -> Expectation:
    """Computes the prompts with transformers' own attention; `network` still has its eager implementation."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary_size, (LONG_TOKENS + SHORT_TOKENS,), generator=generator).tolist()
    prompts = (ids[:LONG_TOKENS], ids[LONG_TOKENS:])

    def computed() -> tuple[Any, Any]:
        # transformers would advise to install faster kernels of Mamba 2, which only this computation would use.
        with torch.inference_mode(), quiet_transformers():
            first, second = (
                network(
                    input_ids=torch.tensor([prompt], device=network.device),
                    use_cache=False,
                    output_hidden_states=has_states,
                )
                for prompt in prompts
            )
        return first, second

    first, second = computed()
    logits = first.logits[0].float(), second.logits[0].float()
    if has_states:
        layers = mixing_layers(network)
        of_first, of_second = (torch.cat([of.hidden_states[layer] for layer in layers]) for of in (first, second))
        return Expectation(prompts, logits, states=(of_first, of_second))
    if network.dtype not in HALVES:
        return Expectation(prompts, logits)
    with InFloat32():
        first, second = computed()
    return Expectation(prompts, logits, (first.logits[0], second.logits[0]))


def compare(
    expectation: Expectation,
    forward: Callable[[StepBatch], Tensor],
    dtype: torch.dtype,
    *,
    has_rounded_products: bool = False,
    quantized_kv: torch.dtype | None = None,
    routes_by_itself: bool = False,
) -> None:
    """Raises `SelfCheckError` if `forward`, with `NUM_BLOCKS` blocks of `BLOCK_SIZE` and `NUM_SLOTS` slots of recurrent
    state, yields other logits.

    `routes_by_itself`: it does not use the routers of transformers for its experts.
    """
    long, short = sequences(expectation.prompts)
    tolerance = TOLERANCE_OF_PRODUCTS if has_rounded_products else TOLERANCE.get(dtype, TOLERANCE_OF_HALF)
    tolerance += 0.0 if quantized_kv is None else TOLERANCE_OF_KV[quantized_kv]
    tolerance += TOLERANCE_OF_ROUTING if routes_by_itself and dtype != torch.float32 else 0.0
    steps = (
        ((long, 0, CHUNK_TOKENS), (short, 0, SHORT_TOKENS - 1)),
        ((short, SHORT_TOKENS - 1, SHORT_TOKENS), (long, CHUNK_TOKENS, LONG_TOKENS)),
    )
    references = [expectation.logits] if expectation.exact is None else [expectation.logits, expectation.exact]
    for step in steps:
        rows = [PlanRow(sequence, start, end - start, True) for sequence, start, end in step]
        logits = forward(pack(StepPlan.of(rows), BLOCK_SIZE))
        distance = min(
            relative_distance(logits, torch.stack([of[sequence is short][end - 1] for sequence, _, end in step]))
            for of in references
        )
        if not distance <= tolerance:
            raise SelfCheckError(
                "the self-check failed: logits through paged attention are not those of transformers (relative "
                f"distance {distance:.2g}, at most {tolerance:.2g})"
            )


class InFloat32(TorchFunctionMode):
    """Computes with float32 numbers in place of those in half precision, one operation at a time, so that no second
    copy of the weights is needed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.embedding:  # reads few of its rows
            return _widened(func(*args, **kwargs))
        if func is functional.linear and args[1].dtype in HALVES:
            return _linear(*args, **kwargs)
        return func(*tree_map(_widened, args), **tree_map(_widened, kwargs))


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `functional.linear` in float32, with some rows of the weight at a time."""
    some = max(1, NUMBERS_AT_ONCE // weight.shape[1])
    outputs = torch.cat([functional.linear(inputs.float(), rows.float()) for rows in weight.split(some)], -1)
    return outputs if bias is None else outputs + bias.float()


def relative_distance(logits: Tensor, expected: Tensor) -> float:
    """Returns the largest |logits - expected| / |expected - its mean| over the rows."""
    if logits.shape != expected.shape:
        return float("inf")
    centred = expected - expected.mean(-1, keepdim=True)
    return float(((logits - expected).norm(dim=-1) / centred.norm(dim=-1)).max())


def sequences(prompts: tuple[list[int], list[int]]) -> tuple[Sequence, Sequence]:
    """Returns the long and the short prompt with blocks."""
    long, short = (_sequence(prompt) for prompt in prompts)
    long.block_table, short.block_table = [3, 1], [2]
    long.state_slot, short.state_slot = range(NUM_SLOTS)
    return long, short


def _sequence(prompt: list[int]) -> Sequence:
    greedy = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
    return Sequence("self-check", 1, prompt, len(prompt), greedy, Stopping(1, 0, frozenset()), 0, None)
