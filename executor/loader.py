"""Loading of an executor: its ranks, its model, and the sizes of its adapters, its KV pool and its batches."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

import torch

from inflight.common.kv_size import (
    KvBudget,
    KvGroups,
    StateSize,
    host_sizes,
    hybrid_sizes,
    most_seats,
    num_host_kv_blocks,
    num_kv_blocks,
    num_seats,
)
from inflight.common.machine import num_available_memory_bytes
from inflight.common.model_source import ModelSource, resolve_model
from inflight.common.settings import SettingError
from inflight.executor.adapters.folder import AdapterFolder
from inflight.executor.adapters.store import AdapterStore
from inflight.executor.adapters.weights import AdapterLimits
from inflight.executor.attention.gpu_host_tier import staging_bytes
from inflight.executor.checkpoint.shards import WHOLE
from inflight.executor.device import free_device_bytes, gpu_bytes
from inflight.executor.engine.runner import StepSizes
from inflight.executor.forward.forward import Forward, StateMemory
from inflight.executor.kv_groups import choose_kv_groups
from inflight.executor.model.model import PagedModel
from inflight.executor.parallel.leader import WorkerGroup
from inflight.executor.ranks import (
    check_devices,
    check_parallel,
    load_shard,
    open_group,
    threads_per_rank,
    with_step_tokens,
)
from inflight.executor.recurrent.mixer import StateSizes
from inflight.executor.scheduler.limits import Batching, KvWindow, SchedulerLimits, SchedulerPolicy, StateLimits
from inflight.executor.settings import ExecutorSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model, and the sizes of its KV pool and its batches."""

    source: ModelSource
    model: PagedModel
    num_blocks: int
    limits: SchedulerLimits
    adapters: AdapterStore | None = None
    group: WorkerGroup | None = None


def load_executor(settings: ExecutorSettings) -> Loaded:
    """Starts the other ranks if there are any, loads the model and sizes its KV pool and its steps."""
    check_parallel(settings)
    check_devices(settings)
    settings = with_step_tokens(settings)
    group = open_group(settings)
    try:
        return _load(settings, group)
    except BaseException:
        if group is not None:
            group.close()
        raise


def step_sizes(settings: ExecutorSettings, limits: SchedulerLimits) -> StepSizes:
    """Returns the sizes with which the runner of the steps is made."""
    return StepSizes(limits, settings.tokens_per_block, settings.enable_cuda_graphs, settings.cuda_graph_max_tokens)


def _load(settings: ExecutorSettings, group: WorkerGroup | None) -> Loaded:
    if settings.max_num_tokens < settings.max_num_sequences:
        raise SettingError(
            f"max_num_tokens={settings.max_num_tokens} must be at least max_num_sequences={settings.max_num_sequences}"
        )
    torch.set_num_threads(threads_per_rank(settings))
    began = time.monotonic()
    source = resolve_model(settings.model)
    model = load_shard(settings, source, WHOLE if group is None else group.shard, group)
    adapters = _adapters(settings, model.forward, group)
    num_blocks, limits = _allocate(settings, model, group)
    log.info(
        "%s on %s (%s, weights %s, KV %s, %s) is ready after %.1f s: %d KV blocks of %d tokens, %d seats%s, "
        "%s batching",
        source.name,
        model.device,
        model.description.dtype,
        model.description.weight_dtype,
        model.description.kv_cache_dtype,
        model.forward.backend_name,
        time.monotonic() - began,
        num_blocks,
        settings.tokens_per_block,
        limits.max_num_sequences,
        "" if settings.max_num_sequences else " (from the size of the KV cache)",
        settings.batching,
    )
    if limits.num_host_blocks:
        others = f" and {limits.num_host_slots} slots of recurrent state" if limits.states else ""
        what = "preempted sequences" if limits.states else "preempted sequences and evicted prefixes"
        log.info("%d KV blocks%s of host memory for %s", limits.num_host_blocks, others, what)
    return Loaded(source, model, num_blocks, limits, adapters, group)


def _adapters(settings: ExecutorSettings, forward: Forward, group: WorkerGroup | None) -> AdapterStore | None:
    """Makes the adapter slots, before the KV pool is sized, and reads the adapters."""
    if settings.adapter_folder is None:
        return None
    what = f"adapter_folder={settings.adapter_folder}"
    memory = forward.adapters
    # Those that run by transformers on a GPU have no recurrent layers.
    if memory is None and forward.states is not None and forward.backend_name == "triton":
        raise SettingError(
            f"{what}: adapters of models with gates of attention, or with feed-forward layers without gates, need a CPU"
        )
    if memory is None:
        raise SettingError(
            f"{what} needs a native forward pass, and this model runs with that of transformers on "
            f"{forward.layout.device} ({forward.backend_name})"
        )
    if not settings.adapter_folder.is_dir():
        raise SettingError(f"{what} is not a folder")
    num_slots, max_rank = settings.max_adapters, settings.max_adapter_rank
    num_bytes = num_slots * memory.slot_bytes(max_rank)
    free_bytes = _free_bytes_for_weights(forward) if group is None else group.free_bytes_per_rank
    if free_bytes is not None and num_bytes > free_bytes:
        raise SettingError(
            f"max_adapters={num_slots} of max_adapter_rank={max_rank} need {num_bytes} bytes and {free_bytes} are free"
        )
    memory.reserve(num_slots, max_rank)
    log.info("%d adapter slots for ranks up to %d take %d bytes", num_slots, max_rank, num_bytes)
    folder = AdapterFolder(settings.adapter_folder, AdapterLimits(memory.shape, max_rank))
    return AdapterStore(folder, num_slots, memory.load)


def _free_bytes_for_weights(forward: Forward) -> int | None:
    """Returns the memory that is free on the device; None if that is unknown."""
    free_bytes = free_device_bytes(forward.layout.device)
    return num_available_memory_bytes() if free_bytes is None else free_bytes


def _allocate(settings: ExecutorSettings, model: PagedModel, group: WorkerGroup | None) -> tuple[int, SchedulerLimits]:
    """Sizes the KV pool and the steps, and allocates the pool. Returns the number of its blocks and the limits."""
    forward, block_size = model.forward, settings.tokens_per_block
    limits = _scheduler_limits(settings, model)
    bytes_per_block = forward.layout.bytes_per_block(block_size)
    device_bytes = forward.free_device_bytes(step_sizes(settings, limits))
    if device_bytes is None:
        budget = (_free_host_bytes(group), settings.kv_cache_free_host_mem_fraction)
    else:
        host_tier_bytes = staging_bytes(bytes_per_block, settings.kv_cache_host_memory_bytes // bytes_per_block)
        budget = (device_bytes - host_tier_bytes, settings.kv_cache_free_gpu_mem_fraction)
    kv_budget = KvBudget(settings.max_tokens_in_paged_kv_cache, *budget)
    if forward.states is not None:
        if settings.kv_cache_host_memory_bytes and not limits.is_overcommitted:
            raise SettingError(
                "kv_cache_host_memory_bytes keeps preempted sequences of models with recurrent layers, and only "
                "batch_scheduler_policy=max_utilization with batching=inflight preempts"
            )
        return _allocate_hybrid(settings, model, limits, kv_budget, forward.states, group)
    num_blocks = num_kv_blocks(kv_budget, block_size, bytes_per_block)
    groups = choose_kv_groups(settings, forward, limits, num_blocks)
    if groups is None:
        limits = _with_seats(settings, limits, num_blocks)
    else:
        num_blocks, limits = groups.num_blocks, _with_groups(settings, forward, limits, groups)
    # The memory of a pool on the host counts as free until it is written to.
    free_bytes = _free_host_bytes(group) - (num_blocks * bytes_per_block if device_bytes is None else 0)
    num_host_blocks = num_host_kv_blocks(settings.kv_cache_host_memory_bytes, bytes_per_block, free_bytes)
    limits = replace(limits, num_host_blocks=num_host_blocks)
    model.allocate_kv(num_blocks, block_size, None if groups is None else groups.num_window_blocks)
    return num_blocks, limits


def _allocate_hybrid(
    settings: ExecutorSettings,
    model: PagedModel,
    limits: SchedulerLimits,
    budget: KvBudget,
    states: StateMemory,
    group: WorkerGroup | None,
) -> tuple[int, SchedulerLimits]:
    """The same for a model with recurrent layers, whose state is a second kind of cache."""
    block_size, slot_bytes = settings.tokens_per_block, states.slot_bytes(limits.max_drafts)
    bytes_per_block = model.forward.layout.bytes_per_block(block_size)
    sizes = hybrid_sizes(
        budget,
        block_size,
        bytes_per_block,
        StateSize(slot_bytes, states.checkpoint_bytes, states.grid_tokens),
        context_length=limits.context_length,
        num_seats_set=settings.max_num_sequences,
        most_seats=limits.max_num_sequences,
        keeps_prefixes=limits.enable_prefix_cache,
    )
    if limits.enable_prefix_cache and not sizes.num_checkpoints:
        log.warning("no prefix is reused, because there is no memory for a checkpoint of recurrent state")
    is_on_gpu = free_device_bytes(model.device) is not None
    taken_bytes = 0 if is_on_gpu else sizes.num_blocks * bytes_per_block + sizes.num_slots * slot_bytes
    num_host_blocks, num_host_slots = host_sizes(
        settings.kv_cache_host_memory_bytes,
        bytes_per_block,
        slot_bytes,
        sizes.num_seats,
        _free_host_bytes(group) - taken_bytes,
    )
    states.reserve(StateSizes(sizes.num_slots, sizes.num_checkpoints, limits.max_drafts))
    model.allocate_kv(sizes.num_blocks, block_size)
    log.info(
        "recurrent state: %d slots of %d bytes and %d checkpoints of %d bytes, at multiples of %d tokens",
        sizes.num_slots,
        slot_bytes,
        sizes.num_checkpoints,
        states.checkpoint_bytes,
        sizes.checkpoint_tokens,
    )
    return sizes.num_blocks, replace(
        limits,
        max_num_sequences=sizes.num_seats,
        num_standby_sequences=_num_standby(settings, sizes.num_seats),
        enable_prefix_cache=limits.enable_prefix_cache and sizes.num_checkpoints > 0,
        num_host_blocks=num_host_blocks,
        states=StateLimits(
            sizes.num_slots,
            sizes.num_checkpoints,
            sizes.checkpoint_tokens,
            frozenset(model.description.eos_token_ids),
            num_host_slots,
            slot_bytes * block_size // bytes_per_block,
        ),
    )


def _free_host_bytes(group: WorkerGroup | None) -> int:
    """Returns the memory that is free for each rank."""
    return (num_available_memory_bytes() or 0) if group is None else group.free_bytes_per_rank


def _scheduler_limits(settings: ExecutorSettings, model: PagedModel) -> SchedulerLimits:
    """Returns the limits. If the seats are not set, they are the most there can be: the memory that steps take is
    measured with them, before the KV pool is sized."""
    max_num_sequences = settings.max_num_sequences or most_seats(gpu_bytes(model.device), settings.max_num_tokens)
    return SchedulerLimits(
        max_num_sequences=max_num_sequences,
        num_standby_sequences=_num_standby(settings, max_num_sequences),
        max_num_tokens=settings.max_num_tokens,
        context_length=settings.max_sequence_length or model.description.context_length,
        enable_chunked_context=settings.enable_chunked_context,
        batching=Batching(settings.batching),
        enable_prefix_cache=settings.enable_kv_cache_reuse,
        policy=SchedulerPolicy(settings.batch_scheduler_policy),
        max_drafts=0 if settings.speculation == "off" else settings.speculation_max_drafts,
    )


def _with_seats(settings: ExecutorSettings, limits: SchedulerLimits, num_blocks: int) -> SchedulerLimits:
    """Returns the limits with the seats that the KV pool is likely to fill, unless the setting gives their number."""
    if settings.max_num_sequences:
        return limits
    seats = num_seats(num_blocks, settings.tokens_per_block, limits.context_length, limits.max_num_sequences)
    return replace(limits, max_num_sequences=seats, num_standby_sequences=_num_standby(settings, seats))


def _with_groups(
    settings: ExecutorSettings, forward: Forward, limits: SchedulerLimits, groups: KvGroups
) -> SchedulerLimits:
    num_tokens = max(window or 0 for window in forward.layout.sliding_windows)
    return replace(
        limits,
        max_num_sequences=groups.num_seats,
        num_standby_sequences=_num_standby(settings, groups.num_seats),
        kv_window=KvWindow(num_tokens, groups.num_window_blocks, groups.max_sequences),
    )


def _num_standby(settings: ExecutorSettings, max_num_sequences: int) -> int:
    """Returns the standby limit. A static batch is filled from a full batch that collected while the previous one
    ran."""
    return max_num_sequences if settings.batching == "static" else settings.num_standby_sequences
