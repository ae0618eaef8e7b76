"""Interface of a way to compute the steps of a model.

    module          computes                                                   on
    transformers    the network of transformers, with paged attention          any device
    native          the C++ code                                               a CPU
    native_ranks    the C++ code, a shard of the weights on each rank          CPUs
    hybrid          as `transformers`, with slots of state of recurrent layers  a CPU
    gpu             fused products and Triton kernels, by CUDA graphs          a GPU
    gpu_network     the network of transformers, in the steps of `gpu`         a GPU
    gpu_ranks       the same, a shard of the weights on each rank              GPUs

A new way is one more module here, and its choice in `executor/model/loader.py`. A forward pass has the weights and no
KV: the caller keeps what `allocate_kv` returns and passes it to each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

from torch import Tensor

from inflight.executor.adapters.folder import KnownAdapter
from inflight.executor.adapters.weights import AdapterWeights
from inflight.executor.attention.backend import LayerKv
from inflight.executor.attention.host_tier import HostTier, open_host_tier
from inflight.executor.attention.kv_layout import KvLayout
from inflight.executor.checkpoint.decoder_weights import DecoderShape
from inflight.executor.device import free_device_bytes, is_gpu
from inflight.executor.engine.runner import StepRunner, StepSizes
from inflight.executor.recurrent.host_slots import HostSlots
from inflight.executor.recurrent.mixer import StateSizes
from inflight.executor.step.batch import StepBatch
from inflight.executor.step.sampling_columns import SamplingBatch

Kv = tuple[LayerKv, ...]


class AdaptedDecoder(Protocol):
    """A decoder that computes with adapters."""

    @property
    def shape(self) -> DecoderShape: ...

    def adapter_slot_bytes(self, max_rank: int) -> int: ...

    def reserve_adapters(self, num_slots: int, max_rank: int) -> None: ...

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None: ...


@dataclass(frozen=True, slots=True)
class AdapterMemory:
    """Where adapters are kept. `slot_bytes` is the memory of a slot for a rank; `reserve` makes slots for a rank, once
    and before the first step; `load` puts an adapter into a slot, beside steps that do not use it."""

    shape: DecoderShape
    slot_bytes: Callable[[int], int]
    reserve: Callable[[int, int], None]
    load: Callable[[int, KnownAdapter, AdapterWeights], None]

    @classmethod
    def of(cls, decoder: AdaptedDecoder) -> Self:
        """Returns the memory of a decoder on its own."""

        def load(slot: int, adapter: KnownAdapter, weights: AdapterWeights) -> None:
            decoder.load_adapter(slot, weights)

        return cls(decoder.shape, decoder.adapter_slot_bytes, decoder.reserve_adapters, load)


class States(Protocol):
    """The slots and checkpoints of recurrent layers. `slots` returns the tensors of which a slot is a row each."""

    @property
    def grid_tokens(self) -> int: ...

    @property
    def checkpoint_bytes(self) -> int: ...

    def slot_bytes(self, max_drafts: int) -> int: ...

    def reserve(self, sizes: StateSizes) -> None: ...

    def slots(self) -> Sequence[Tensor]: ...


@dataclass(frozen=True, slots=True)
class StateMemory:
    """Where the state of recurrent layers is kept. `slot_bytes` is the memory of a slot for a number of drafts, and
    `checkpoint_bytes` that of a checkpoint, which can be taken at multiples of `grid_tokens`. `reserve` makes slots and
    checkpoints, in place of those that were made before. `open_host_slots` then makes slots of host memory for the
    states of preempted sequences."""

    slot_bytes: Callable[[int], int]
    checkpoint_bytes: int
    grid_tokens: int
    reserve: Callable[[StateSizes], None]
    open_host_slots: Callable[[int], HostTier]

    @classmethod
    def of(cls, states: States) -> Self:
        """Returns the memory of a decoder on its own."""
        return cls(
            states.slot_bytes,
            states.checkpoint_bytes,
            states.grid_tokens,
            states.reserve,
            lambda num_slots: HostSlots(states.slots(), num_slots),
        )


class Forward(Protocol):
    """A way to compute steps, with the weights of a model or of its shard. A new one has at least `logits`; what
    follows behind it is right for one that computes on its own and leaves the rest of a step to `ModelRunner`."""

    # The KV of the layers, and the device that computes.
    layout: KvLayout

    def logits(self, batch: StepBatch, kv: Kv) -> Tensor:
        """Computes every token of the batch, stores its KV, and returns the logits `[R + Q, vocabulary]` in
        float32."""
        ...

    def greedy(self, batch: StepBatch, kv: Kv, sampling: SamplingBatch) -> Tensor | None:
        """Computes a step that reports no log probabilities and returns its token ids `[R]` int64, if it can find them
        without all logits; else None, and nothing is computed."""
        return None

    def start_runner(self, kv: Kv, sizes: StepSizes) -> StepRunner | None:
        """Returns a runner that samples where it computes; None if `ModelRunner` runs the steps."""
        return None

    def allocate_kv(self, num_blocks: int, block_size: int, num_window_blocks: int | None = None) -> Kv:
        """Allocates the KV as `KvLayout.allocate` does, with ranks on each of them."""
        return self.layout.allocate(num_blocks, block_size, num_window_blocks)

    def open_host_tier(self, kv: Kv, num_host_blocks: int) -> HostTier:
        """Opens a host tier for allocated blocks."""
        return open_host_tier(kv, num_host_blocks)

    def free_device_bytes(self, sizes: StepSizes) -> int | None:
        """Returns the memory of its GPU, with ranks the least of all, that is free beside steps; None if the KV is in
        the memory of the host."""
        return free_device_bytes(self.layout.device)

    @property
    def backend_name(self) -> str:
        """The attention backend, as routers are told once the runner is started."""
        return self.layout.backend.name

    @property
    def adapters(self) -> AdapterMemory | None:
        """None: it cannot compute with adapters."""
        return None

    @property
    def states(self) -> StateMemory | None:
        """None: no layer is recurrent."""
        return None

    @property
    def has_window_pools(self) -> bool:
        """Whether layers with a sliding window may have fewer blocks than the others."""
        return not is_gpu(self.layout.device)

    @property
    def routes_by_itself(self) -> bool:
        """Whether it chooses the experts of a token itself, rather than by the code of transformers."""
        return False


@runtime_checkable
class SeparatesLayers(Protocol):
    """A forward pass whose layers can be computed one by one, for the check of FP8."""

    def separate_layers(self, inputs: Tensor, batch: StepBatch, kv: Kv) -> tuple[Tensor, Tensor]:
        """See `GpuDecoder.separate_layers`."""
        ...
