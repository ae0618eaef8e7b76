"""Choice between one KV pool for all layers and a pool of their own for layers with a sliding window.

Requests reserve blocks of the layers that attend to the whole context, in the ledger and here. The window pool is
sized by the seats, so that it is never what a request waits for.
"""

from __future__ import annotations

import logging

from inflight.common.kv_size import KvGroups, WindowSize, kv_groups
from inflight.executor.forward.forward import Forward
from inflight.executor.scheduler.limits import SchedulerLimits
from inflight.executor.settings import ExecutorSettings

log = logging.getLogger(__name__)


def choose_kv_groups(
    settings: ExecutorSettings, forward: Forward, limits: SchedulerLimits, num_blocks: int
) -> KvGroups | None:
    """Returns the sizes of the two pools that take the memory of `num_blocks` blocks of all layers; None for one
    pool."""
    windows = [
        window for window in forward.layout.sliding_windows if window is not None and window < limits.context_length
    ]
    if not windows or settings.kv_window_groups == "off":
        return None
    if obstacle := _obstacle(settings, forward):
        log.info("all layers keep the KV of the whole context, because %s", obstacle)
        return None
    full_bytes, window_bytes = forward.layout.bytes_per_group_block(settings.tokens_per_block)
    groups = kv_groups(
        num_blocks,
        full_bytes,
        window_bytes,
        _window_size(settings, limits, max(window for window in forward.layout.sliding_windows if window is not None)),
        num_seats_set=settings.max_num_sequences,
        most_seats=limits.max_num_sequences,
        is_limited=settings.max_tokens_in_paged_kv_cache > 0,
        keeps_prefixes=limits.enable_prefix_cache,
    )
    if groups is None:
        log.info("all layers keep the KV of the whole context, because windows of all seats take as much memory")
    else:
        log.info(
            "%d layers with sliding windows keep their window: %d KV blocks for %d sequences at most",
            sum(window is not None for window in forward.layout.sliding_windows),
            groups.num_window_blocks,
            groups.max_sequences,
        )
    return groups


def _obstacle(settings: ExecutorSettings, forward: Forward) -> str | None:
    if not forward.has_window_pools:
        return "several GPUs, and FlashInfer, have one block table for all layers"
    if settings.kv_cache_host_memory_bytes:
        return "kv_cache_host_memory_bytes is set"
    return None


def _window_size(settings: ExecutorSettings, limits: SchedulerLimits, num_window_tokens: int) -> WindowSize:
    # Without chunks a prompt is one step.
    max_step_tokens = limits.max_num_tokens
    if not limits.enable_chunked_context:
        max_step_tokens = max(max_step_tokens, limits.context_length)
    return WindowSize(
        num_window_tokens=num_window_tokens,
        max_step_tokens=max_step_tokens,
        context_length=limits.context_length,
        max_drafts=0 if settings.speculation == "off" else settings.speculation_max_drafts,
        tokens_per_block=settings.tokens_per_block,
    )
