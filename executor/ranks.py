"""Tensor parallelism as a process sees it: its settings, the workers that a leader starts, and a worker's own process.

A worker has the leader's exit codes: 2 if its model cannot be used or the leader refuses it, 1 if it fails.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from dataclasses import fields

import torch

from inflight.common.kv_size import default_step_tokens
from inflight.common.machine import num_usable_cores
from inflight.common.model_source import ModelSource, resolve_model
from inflight.common.settings import ENV_PREFIX, SettingError
from inflight.executor.attention.cpu import CpuAttention
from inflight.executor.checkpoint.shards import Shard
from inflight.executor.cpu.weight_form import ExecutorSizes
from inflight.executor.device import choose_device, gpu_bytes, is_gpu
from inflight.executor.forward.native import NativeForward
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.parallel.cpu_shard import CpuShard
from inflight.executor.parallel.leader import GroupSettings, WorkerGroup
from inflight.executor.parallel.member import Executes, Member, Welcome
from inflight.executor.settings import ExecutorSettings

log = logging.getLogger(__name__)

LEAST_STEP_TOKENS = 16

# What a GPU forward pass of several ranks lacks: settings, and the values with which they do not need it.
WITHOUT_RANKS_ON_GPUS = {
    "adapter_folder": (None,),
    "attention_backend": ("auto", "triton"),
    "kv_cache_dtype": ("auto", "bfloat16", "float32"),
    "kv_cache_host_memory_bytes": (0,),
    "speculation": ("off",),
    "weight_dtype": ("auto", "dense"),
}


def check_parallel(settings: ExecutorSettings) -> None:
    """Raises `SettingError` for settings that do not go together."""
    size, rank = settings.tensor_parallel_size, settings.tensor_parallel_rank
    if rank >= size:
        raise SettingError(f"tensor_parallel_rank={rank} must be below tensor_parallel_size={size}")
    if bool(rank) != bool(settings.tensor_parallel_leader):
        raise SettingError("tensor_parallel_rank from 1 on and tensor_parallel_leader need each other")
    if size == 1:
        return
    for name in ("tensor_parallel_listen", "tensor_parallel_leader"):
        value: str = getattr(settings, name)
        if value and not value.rpartition(":")[2].isdigit():
            raise SettingError(f"{name}={value} is not host:port")


def check_devices(settings: ExecutorSettings) -> None:
    """Raises `SettingError` if there are too few GPUs, or for settings with which ranks do not run on GPUs."""
    size, first = settings.tensor_parallel_size, settings.device_index
    device = choose_device(settings.device)
    if first and settings.device != "cpu" and not is_gpu(device):
        raise SettingError(f"device_index={first}: torch finds no such GPU")
    if size == 1 or (not is_gpu(device) and settings.attention_backend != "triton"):
        return
    for name, allowed in WITHOUT_RANKS_ON_GPUS.items():
        if (value := getattr(settings, name)) not in allowed:
            raise SettingError(f"{name}={value} does not go with tensor_parallel_size={size} on GPUs")
    if is_gpu(device) and _starts_others(settings) and (count := torch.cuda.device_count()) < size:
        raise SettingError(
            f"tensor_parallel_size={size} needs a GPU for each rank from device_index={first} on, and torch finds "
            f"{count}"
        )


def _starts_others(settings: ExecutorSettings) -> bool:
    """Returns whether this process starts the other ranks."""
    is_alone = settings.tensor_parallel_listen or settings.tensor_parallel_rank
    return settings.tensor_parallel_size > 1 and not is_alone


def threads_per_rank(settings: ExecutorSettings) -> int:
    """Returns the compute threads of this process."""
    if settings.num_threads:
        return settings.num_threads
    return max(1, num_usable_cores() // (settings.tensor_parallel_size if _starts_others(settings) else 1))


def open_group(settings: ExecutorSettings) -> WorkerGroup | None:
    """Starts the other ranks, or lets them join; None if there are none."""
    if settings.tensor_parallel_size == 1:
        return None
    return WorkerGroup(
        GroupSettings(
            settings.tensor_parallel_size,
            settings.tensor_parallel_listen,
            settings.tensor_parallel_timeout_s,
            settings.max_num_tokens,
            _environment(settings),
            has_gpus=choose_device(settings.device).type == "cuda",
        )
    )


def load_shard(settings: ExecutorSettings, source: ModelSource, shard: Shard, group: WorkerGroup | None) -> PagedModel:
    """Loads a rank's part of the model, or without other ranks all of it."""
    return load_model(
        source,
        dtype_name=settings.dtype,
        backend_name=settings.attention_backend,
        device_name=settings.device,
        weight_dtype=settings.weight_dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        kv_cache_skip_layers=settings.kv_cache_dtype_skip_layers,
        forward_name=settings.forward,
        pooling_name=settings.pooling,
        instructions=settings.cpu_isa,
        max_sequence_length=settings.max_sequence_length,
        eos_token_ids=settings.eos_token_ids,
        sizes=sizes_of(settings),
        shard=shard,
        group=group,
    )


def with_step_tokens(settings: ExecutorSettings) -> ExecutorSettings:
    """Returns the settings with the tokens of a step that the device has by default, unless they are set. Raises
    `SettingError` if they are too few."""
    if settings.max_num_tokens:
        if settings.max_num_tokens < LEAST_STEP_TOKENS:
            raise SettingError(f"max_num_tokens={settings.max_num_tokens} must be at least {LEAST_STEP_TOKENS}")
        return settings
    num_tokens = default_step_tokens(gpu_bytes(choose_device(settings.device)))
    return settings.model_copy(update={"max_num_tokens": max(num_tokens, settings.max_num_sequences)})


def sizes_of(settings: ExecutorSettings) -> ExecutorSizes:
    """Returns the settings that decide the form of quantized weights."""
    return ExecutorSizes(**{field.name: getattr(settings, field.name) for field in fields(ExecutorSizes)})


def run_worker(settings: ExecutorSettings) -> int:
    """Runs a rank other than the leader until the leader ends, which ends this process."""
    # The leader drains its sequences on these signals, and needs its workers meanwhile.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    check_devices(settings)
    torch.set_num_threads(threads_per_rank(settings))
    rank = settings.tensor_parallel_rank
    member = Member(Shard(rank, settings.tensor_parallel_size), settings.tensor_parallel_leader)
    try:
        model = load_shard(settings, resolve_model(settings.model), member.shard, None)
        member.serve(model.description.hello(rank), lambda welcome: _start_shard(settings, model, member, welcome))
    except Exception as error:
        member.fail(error)
        raise
    return 0


def _start_shard(settings: ExecutorSettings, model: PagedModel, member: Member, welcome: Welcome) -> Executes:
    """Connects a worker's part of the model with the other ranks."""
    forward = model.forward
    if isinstance(forward, NativeForward):
        assert isinstance(forward.layout.backend, CpuAttention)
        exchange = member.open_exchange(welcome, forward.layout.backend.library)
        return CpuShard(model, forward.decoder, exchange, settings.adapter_folder, member.reply)
    from inflight.executor.forward.gpu import GpuForward  # imports triton, which only this needs
    from inflight.executor.parallel.gpu_shard import GpuShard

    assert isinstance(forward, GpuForward)
    ranks = member.open_device_exchange(welcome, model.device)
    return GpuShard(model, forward.decoder, ranks, lambda sizes: forward.free_device_bytes(sizes) or 0)


def _environment(settings: ExecutorSettings) -> Mapping[str, str]:
    """Returns all settings as a worker's environment, where they come before a file's. An empty variable is the
    default."""
    values = {name: getattr(settings, name) for name in type(settings).model_fields}
    values["num_threads"] = threads_per_rank(settings)
    texts = {f"{ENV_PREFIX}{name.upper()}": _text(value) for name, value in values.items()}
    return texts | {f"{ENV_PREFIX}CONFIG": ""}


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
