"""Sizes of the KV pools, on an executor's device and in host memory, and of recurrent state. Pure; `inflight size` uses
it as well."""

from __future__ import annotations

import math
from dataclasses import dataclass

from inflight.common.settings import SettingError


@dataclass(frozen=True, slots=True)
class KvBudget:
    """What the pool may take: `max_tokens` if it is set (not 0), else `fraction` of the free bytes."""

    max_tokens: int
    free_bytes: int
    fraction: float


def num_kv_blocks(budget: KvBudget, tokens_per_block: int, bytes_per_block: int) -> int:
    """Returns the blocks of the pool without the spare one.

    Raises:
        SettingError: not even one block fits, or `max_tokens` needs more than is free.
    """
    num_free = budget.free_bytes // bytes_per_block
    if budget.max_tokens:
        num_blocks = budget.max_tokens // tokens_per_block
        if num_blocks > num_free:
            raise SettingError(
                f"max_tokens_in_paged_kv_cache={budget.max_tokens} needs {num_blocks * bytes_per_block} bytes and "
                f"{budget.free_bytes} are free"
            )
    else:
        num_blocks = int(num_free * budget.fraction)
    if num_blocks < 1:
        raise SettingError(
            f"the KV pool would have no block: {budget.free_bytes} bytes are free, a block of {tokens_per_block} "
            f"tokens takes {bytes_per_block}; free memory or raise the fraction or max_tokens_in_paged_kv_cache"
        )
    return num_blocks


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_bytes: int) -> int:
    """Returns the bytes of a key and a value, `head_bytes` each, of each KV head in each layer."""
    return 2 * num_layers * num_kv_heads * head_bytes


def numbers_of_ranks(num_heads: int, num_kv_heads: int) -> list[int]:
    """Returns how many ranks can divide the heads between them. Either each has some of the KV heads, or several have
    the same one."""
    return [
        n for n in range(1, num_heads + 1) if num_heads % n == 0 and (num_kv_heads % n == 0 or n % num_kv_heads == 0)
    ]


def kv_heads_of_rank(num_kv_heads: int, num_ranks: int) -> int:
    """Returns the KV heads that each rank has."""
    return max(1, num_kv_heads // num_ranks)


def blocks_for(num_tokens: int, tokens_per_block: int) -> int:
    """Returns the blocks for `num_tokens` tokens."""
    return -(-num_tokens // tokens_per_block)


@dataclass(frozen=True, slots=True)
class WindowSize:
    """What the pool of the layers with a sliding window must hold: windows of `num_window_tokens`, steps of
    `max_step_tokens`, contexts of `context_length`, and drafts of `max_drafts` tokens."""

    num_window_tokens: int
    max_step_tokens: int
    context_length: int
    max_drafts: int
    tokens_per_block: int

    def num_sequences(self, num_seats: int) -> int:
        """Returns how many sequences may hold window blocks. Those whose last step has not retired hold some beside the
        seated ones; more than these are waited for."""
        return num_seats + blocks_for(num_seats, 8)

    def num_blocks(self, num_seats: int) -> int:
        """Returns the blocks with which no sequence ever lacks one.

        A sequence holds its window, drafts of two steps at most that may turn out wrong, and what the steps in flight
        compute, which are two at most. Its first and its last block may be partly used.
        """
        num_kept = self.num_window_tokens - 1 + 2 * self.max_drafts
        per_sequence = min(blocks_for(num_kept, self.tokens_per_block) + 2, self._blocks_of_context)
        in_flight = 2 * blocks_for(self.max_step_tokens, self.tokens_per_block)
        num_sequences = self.num_sequences(num_seats)
        return min(num_sequences * per_sequence + in_flight, num_sequences * self._blocks_of_context)

    @property
    def _blocks_of_context(self) -> int:
        return blocks_for(self.context_length, self.tokens_per_block)


# Prompt and output of a usual request. Shorter ones leave blocks unused while every seat is taken, longer ones seats.
TOKENS_PER_SEAT = 1024
LEAST_SEATS = 8
# On a GPU the most seats and the tokens of a step are those of vLLM's server.
LARGE_GPU_BYTES = 70 << 30
STEP_TOKENS, STEP_TOKENS_OF_LARGE_GPU = 1024, 8192
# A step of 64 sequences takes about twice as long as one of 32 on a CPU, for a fifth more tokens per second.
MOST_SEATS_OF_CPU, MOST_SEATS_OF_GPU, MOST_SEATS_OF_LARGE_GPU = 64, 256, 1024


def default_step_tokens(gpu_bytes: int) -> int:
    """Returns the tokens of the largest step, given the memory of the GPU, 0 for a CPU."""
    return STEP_TOKENS_OF_LARGE_GPU if gpu_bytes >= LARGE_GPU_BYTES else STEP_TOKENS


def most_seats(gpu_bytes: int, max_num_tokens: int) -> int:
    """Returns the upper bound of `num_seats`, given the memory of the GPU, 0 for a CPU. Each seat needs a token in
    every step."""
    if gpu_bytes >= LARGE_GPU_BYTES:
        return min(MOST_SEATS_OF_LARGE_GPU, max_num_tokens)
    return min(MOST_SEATS_OF_GPU if gpu_bytes else MOST_SEATS_OF_CPU, max_num_tokens)


def num_seats(num_blocks: int, tokens_per_block: int, context_length: int, most: int) -> int:
    """Returns the seats that a pool of this size is likely to fill. Requests without room for their blocks wait, so
    more seats are not used and fewer leave blocks unused."""
    tokens_per_seat = min(TOKENS_PER_SEAT, context_length)
    return min(most, max(LEAST_SEATS, num_blocks * tokens_per_block // tokens_per_seat))


@dataclass(frozen=True, slots=True)
class KvGroups:
    """Two KV pools: `num_blocks` blocks of the layers that attend to the whole context, which requests reserve, and
    `num_window_blocks` of those with a sliding window. `max_sequences` may hold window blocks at a time."""

    num_blocks: int
    num_window_blocks: int
    num_seats: int
    max_sequences: int


# Share of the blocks of one pool for all layers that a window pool has beside what its sequences need, so that windows
# of earlier prefixes stay: without them a prefix cannot be used.
PREFIX_WINDOWS_SHARE = 1 / 8


def kv_groups(
    num_blocks: int,
    full_bytes: int,
    window_bytes: int,
    window: WindowSize,
    *,
    num_seats_set: int,
    most_seats: int,
    is_limited: bool,
    keeps_prefixes: bool,
) -> KvGroups | None:
    """Returns the two pools that take the memory of `num_blocks` blocks of all layers; None if windows save nothing.

    A block takes `full_bytes` and `window_bytes` in the layers of each kind. The seats are `num_seats_set`, or where
    that is 0 as many as the blocks are likely to fill, at most `most_seats`. With `is_limited` the number of blocks is
    set, and windows save memory instead.
    """
    most_blocks = blocks_for(window.context_length, window.tokens_per_block)
    num_for_prefixes = int(num_blocks * PREFIX_WINDOWS_SHARE) if keeps_prefixes else 0
    for seats in [num_seats_set] if num_seats_set else range(most_seats, 0, -1):
        max_sequences, num_window_blocks = window.num_sequences(seats), window.num_blocks(seats) + num_for_prefixes
        if num_window_blocks >= num_blocks:
            continue
        if is_limited:
            num_full_blocks = num_blocks
        elif full_bytes:
            num_bytes = num_blocks * (full_bytes + window_bytes) - num_window_blocks * window_bytes
            num_full_blocks = num_bytes // full_bytes
        else:
            # Blocks without memory: as many as there are tokens in the longest contexts of all seats.
            num_full_blocks, num_window_blocks = max(num_blocks, seats * most_blocks), num_blocks
        likely = num_seats(num_full_blocks, window.tokens_per_block, window.context_length, most_seats)
        if num_seats_set or likely >= seats:
            return KvGroups(num_full_blocks, num_window_blocks, seats, max_sequences)
    return None


def num_host_kv_blocks(num_bytes: int, bytes_per_block: int, free_bytes: int) -> int:
    """Returns the blocks of host memory for `kv_cache_host_memory_bytes`; `free_bytes` is the memory left by everything
    else.

    Raises:
        SettingError: not even one block fits, or more is requested than is free.
    """
    num_blocks = num_bytes // bytes_per_block
    if num_bytes and not num_blocks:
        raise SettingError(
            f"kv_cache_host_memory_bytes={num_bytes} holds no block, which takes {bytes_per_block} bytes"
        )
    if num_blocks * bytes_per_block > max(0, free_bytes):
        raise SettingError(
            f"kv_cache_host_memory_bytes={num_bytes} is more than the {max(0, free_bytes)} bytes of host memory that "
            "are free beside the KV pool"
        )
    return num_blocks


# Share of the cache that checkpoints take: of 1/8, 1/5, 1/4, 1/3 and 1/2 the one with which most of the prompts of
# agents is found (`tests/support/scheduler/agent_trace.py`, states as large as those of Qwen3.5-35B). No more than one
# for so many tokens of KV are of use: a request saves a few, and has thousands of tokens. And the most that slots take
# where the seats are not set.
CHECKPOINTS_SHARE = 1 / 4
TOKENS_PER_CHECKPOINT = 256
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
        most = left_bytes // bytes_per_block * tokens_per_block // max(checkpoint_tokens, TOKENS_PER_CHECKPOINT)
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


def host_sizes(
    num_bytes: int, bytes_per_block: int, slot_bytes: int, num_seats: int, free_bytes: int
) -> tuple[int, int]:
    """Returns the KV blocks and the slots of recurrent state of `kv_cache_host_memory_bytes`. A preempted sequence
    takes a slot, so there are at most as many as seats, and they take half of the memory at most.

    Raises:
        SettingError: not even one slot and one block fit, or more is requested than is free.
    """
    if not num_bytes:
        return 0, 0
    num_slots = min(num_seats, int(num_bytes * SLOTS_SHARE) // slot_bytes)
    if not num_slots:
        raise SettingError(
            f"kv_cache_host_memory_bytes={num_bytes}: half of it holds no slot of recurrent state, which takes "
            f"{slot_bytes} bytes"
        )
    slots_bytes = num_slots * slot_bytes
    return num_host_kv_blocks(num_bytes - slots_bytes, bytes_per_block, free_bytes - slots_bytes), num_slots
