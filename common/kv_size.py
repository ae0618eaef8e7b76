"""Sizes of the KV pools, on an executor's device and in host memory. Pure; `inflight size` uses it as well."""

from __future__ import annotations

from dataclasses import dataclass

from common.settings import SettingError


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


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_number: int) -> int:
    """Returns the bytes of a key and a value of each KV head in each layer."""
    return 2 * num_layers * num_kv_heads * head_dim * bytes_per_number


def blocks_for(num_tokens: int, tokens_per_block: int) -> int:
    """Returns the blocks for `num_tokens` tokens."""
    return -(-num_tokens // tokens_per_block)


# Prompt and output of a usual request. Shorter ones leave blocks unused while every seat is taken, longer ones seats.
TOKENS_PER_SEAT = 1024
LEAST_SEATS = 8
# A step of 64 sequences takes about twice as long as one of 32 on a CPU, for a fifth more tokens per second. On a GPU
# the bound is vLLM's default.
MOST_SEATS = {"cpu": 64, "cuda": 256}


def most_seats(device_type: str, max_num_tokens: int) -> int:
    """Returns the upper bound of `num_seats`. Each seat needs a token in every step."""
    return min(MOST_SEATS.get(device_type, MOST_SEATS["cpu"]), max_num_tokens)


def num_seats(num_blocks: int, tokens_per_block: int, context_length: int, most: int) -> int:
    """Returns the seats that a pool of this size is likely to fill. Requests without room for their blocks wait, so
    more seats are not used and fewer leave blocks unused."""
    tokens_per_seat = min(TOKENS_PER_SEAT, context_length)
    return min(most, max(LEAST_SEATS, num_blocks * tokens_per_block // tokens_per_seat))


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
