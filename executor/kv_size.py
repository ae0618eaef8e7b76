"""How many KV blocks an executor gets."""

from __future__ import annotations

from dataclasses import dataclass

from common.settings import SettingError


@dataclass(frozen=True, slots=True)
class KvBudget:
    """What the pool may take: `max_tokens` where it is set (not 0), and `fraction` of the free bytes otherwise."""

    max_tokens: int
    free_bytes: int
    fraction: float


def num_kv_blocks(budget: KvBudget, tokens_per_block: int, bytes_per_block: int) -> int:
    """Blocks of the pool, the spare one not counted.

    Raises:
        SettingError: not even one block fits, or `max_tokens` asks for more than is free.
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
