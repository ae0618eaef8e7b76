"""Measurements on a GPU as plain values: seconds and counts, nothing derived."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """A step of `num_sequences` decodes: through the runner, and the device's part of it alone."""

    num_sequences: int
    context: int
    step_s: float
    device_s: float


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """A prompt computed in one step."""

    num_tokens: int
    step_s: float


@dataclass(frozen=True, slots=True)
class AttentionPoint:
    """The attention kernels of one layer, for decodes."""

    num_sequences: int
    context: int
    kernel_s: float


@dataclass(frozen=True, slots=True)
class ChunkAttentionPoint:
    """Attention of one layer for a prompt chunk that ends a context, by one backend."""

    backend: str
    num_tokens: int
    context: int
    kernel_s: float


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel's part of a step: how often it is launched, and the device's time of all these launches."""

    step: str
    kernel: str
    num_launches: int
    total_s: float


@dataclass(frozen=True, slots=True)
class Missing:
    """What could not be measured, and why, in words."""

    what: str
    reason: str


@dataclass(slots=True)
class GpuFigures:
    """All of one run."""

    circumstances: dict[str, str]
    model: str
    copy_bytes_per_s: float
    matrix_operations_per_s: float
    decodes: list[DecodePoint] = field(default_factory=list)
    penalised_decodes: list[DecodePoint] = field(default_factory=list)
    prefills: list[PrefillPoint] = field(default_factory=list)
    fp8_decodes: list[DecodePoint] = field(default_factory=list)
    fp8_prefills: list[PrefillPoint] = field(default_factory=list)
    kernels: list[KernelTime] = field(default_factory=list)
    attention: list[AttentionPoint] = field(default_factory=list)
    chunk_attention: list[ChunkAttentionPoint] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
