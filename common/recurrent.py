"""Model families with recurrent layers, which executors run, and the memory of those layers. Pure; `inflight size` uses
it as well."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inflight.common.kv_size import KvBudget, blocks_for, num_kv_blocks, num_seats
from inflight.common.settings import SettingError

# By `model_type` of the configuration of the decoder: the kinds of its layers, as in `layer_types`, that are recurrent.
RECURRENT_LAYERS = {"lfm2": frozenset({"conv"})}
# Architectures of GGUF files that are refused.
RECURRENT_GGUF = frozenset({"lfm2"})
# Share of the cache that checkpoints take, and the most that slots take where the seats are not set.
CHECKPOINTS_SHARE = 1 / 8
SLOTS_SHARE = 1 / 2


@dataclass(frozen=True, slots=True)
class StateSize:
    """Memory of a slot and of a checkpoint of recurrent state in all layers, and the tokens between two places where
    one can be taken."""

    slot_bytes: int
    checkpoint_bytes: int
    grid_tokens: int


@dataclass(frozen=True, slots=True)
class HybridSizes:
    """The KV blocks and the recurrent state of an executor; `checkpoint_tokens` are the tokens between two places of
    checkpoints."""

    num_blocks: int
    num_seats: int
    num_slots: int
    num_checkpoints: int
    checkpoint_tokens: int


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """The recurrent layers of a model. `state_numbers` are those of a checkpoint of all of them, and as many of a slot
    without drafts; `weight_numbers` those of the matrices of one."""

    num_layers: int
    state_numbers: int
    weight_numbers: int
    grid_tokens: int


def recurrent_shape(config: Mapping[str, Any], num_layers: int) -> RecurrentShape | None:
    """Returns the recurrent layers by the configuration of a decoder; None if there are none. The defaults are those of
    transformers."""
    if config.get("model_type") != "lfm2":
        return None
    attention = config.get("full_attn_idxs")
    types = config.get("layer_types") or [
        "full_attention" if attention is None or layer in attention else "conv" for layer in range(num_layers)
    ]
    num_recurrent, hidden_size = types[:num_layers].count("conv"), int(config["hidden_size"])
    num_past = int(config.get("conv_L_cache") or 3) - 1
    return RecurrentShape(num_recurrent, num_recurrent * num_past * hidden_size, 4 * hidden_size**2, 1)


def lfm2_inner_size(config: Mapping[str, Any]) -> int:
    """Returns the size of a feed-forward layer of LFM2, whose configuration gives it before it is adjusted."""
    size = int(config.get("block_ff_dim") or config.get("intermediate_size") or 12288)
    if not config.get("block_auto_adjust_ff_dim", True):
        return size
    size = int(float(config.get("block_ffn_dim_multiplier") or 1.0) * (2 * size // 3))
    return blocks_for(size, multiple := int(config.get("block_multiple_of") or 256)) * multiple


def num_slots(num_seats: int) -> int:
    """Returns how many sequences may have state. Those whose last step has not retired have some beside the seated
    ones; more than these are waited for."""
    return num_seats + blocks_for(num_seats, 8)


def hybrid_sizes(
    budget: KvBudget,
    tokens_per_block: int,
    bytes_per_block: int,
    state: StateSize,
    *,
    context_length: int,
    num_seats_set: int,
    most_seats: int,
    keeps_prefixes: bool,
) -> HybridSizes:
    """Divides the memory of the cache between KV and recurrent state. The seats are `num_seats_set`, or where that is 0
    as many as the KV blocks are likely to fill, at most `most_seats`.

    Raises:
        SettingError: not even one block and the slots fit, or more is set than is free.
    """
    cache_bytes = int(budget.free_bytes * budget.fraction)
    if budget.max_tokens:
        cache_bytes = budget.max_tokens // tokens_per_block * bytes_per_block
    seats = num_seats_set
    if not seats:
        seats = num_seats(cache_bytes // bytes_per_block, tokens_per_block, context_length, most_seats)
        fitting = int(cache_bytes * SLOTS_SHARE) // state.slot_bytes
        seats = seats if budget.max_tokens else max(1, min(seats, fitting * 8 // 9))
    slots_bytes = num_slots(seats) * state.slot_bytes
    left_bytes = cache_bytes if budget.max_tokens else cache_bytes - slots_bytes
    checkpoint_tokens = math.lcm(state.grid_tokens, tokens_per_block)
    num_checkpoints = 0
    if keeps_prefixes:
        most = left_bytes // bytes_per_block * tokens_per_block // checkpoint_tokens
        num_checkpoints = max(0, min(most, int(left_bytes * CHECKPOINTS_SHARE) // state.checkpoint_bytes))
    state_bytes = slots_bytes + num_checkpoints * state.checkpoint_bytes
    if budget.max_tokens:
        beside = KvBudget(budget.max_tokens, budget.free_bytes - state_bytes, budget.fraction)
    else:
        beside = KvBudget(0, cache_bytes - state_bytes, 1.0)
    if beside.free_bytes < bytes_per_block:
        raise SettingError(
            f"the recurrent state of {seats} seats takes {slots_bytes} bytes and leaves no KV block: lower "
            f"max_num_sequences, or free memory"
        )
    num_blocks = num_kv_blocks(beside, tokens_per_block, bytes_per_block)
    return HybridSizes(num_blocks, seats, num_slots(seats), num_checkpoints, checkpoint_tokens)
