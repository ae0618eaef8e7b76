"""A loaded model with its KV: steps are computed by its forward pass, and sampled here.

It knows nothing of scheduling, and nothing of how a step is computed (`inflight.executor.forward`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inflight.executor.attention.host_tier import HostTier
from inflight.executor.cpu.sampler import NativeSampler
from inflight.executor.forward.forward import Forward, Kv
from inflight.executor.model.description import ModelDescription
from inflight.executor.pooling.pooled import Pooling
from inflight.executor.step.batch import StepBatch
from inflight.executor.step.logprobs import StepLogprobs, step_logprobs
from inflight.executor.step.sampling import choose_greedily, name_excluded, sample
from inflight.executor.step.sampling_columns import SamplingBatch


class PagedModel:
    """A loaded model. `allocate_kv` must precede the first step."""

    def __init__(
        self,
        description: ModelDescription,
        forward: Forward,
        sampler: NativeSampler | None = None,
        pooling: Pooling | None = None,
    ) -> None:
        self.description = description
        self.forward = forward
        # How it makes embeddings or scores; None if it makes none.
        self.pooling = pooling
        self._sampler = sampler
        self._kv: Kv = ()

    @property
    def kv(self) -> Kv:
        """The KV of each layer, once it is allocated."""
        return self._kv

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self.forward.layout.device

    def allocate_kv(self, num_blocks: int, block_size: int, num_window_blocks: int | None = None) -> None:
        """Allocates blocks as `KvLayout.allocate` does, in place of those that were allocated before."""
        self._kv = self.forward.allocate_kv(num_blocks, block_size, num_window_blocks)

    def open_host_tier(self, num_host_blocks: int) -> HostTier:
        """Opens a host tier for the allocated blocks."""
        return self.forward.open_host_tier(self._kv, num_host_blocks)

    def logits(self, batch: StepBatch) -> Tensor:
        """Computes every token of the batch, stores its KV, and returns the logits `[R + Q, vocabulary]` in
        float32."""
        return self.forward.logits(batch, self._kv)

    def step(
        self, batch: StepBatch, sampling: SamplingBatch, before_sampling: Callable[[], None] | None = None
    ) -> tuple[Tensor, StepLogprobs | None]:
        """Computes the batch, calls `before_sampling`, and samples. Returns the token ids `[R]` int64, on the model's
        device, and the log probabilities that rows report."""
        if not sampling.reporting:
            token_ids = self.forward.greedy(batch, self._kv, sampling)
            if token_ids is not None:
                return token_ids, None
        logits = self.forward.logits(batch, self._kv)
        if before_sampling is not None:
            before_sampling()
        sampled_ids = self.choose(logits[: sampling.num_rows], sampling)
        if not sampling.reporting:
            return sampled_ids, None
        chosen_ids = torch.cat([sampled_ids, batch.target_ids.to(sampled_ids.device)])
        return sampled_ids, step_logprobs(logits, chosen_ids, sampling.reporting)

    def choose(self, logits: Tensor, sampling: SamplingBatch) -> Tensor:
        """Returns the token ids `[R]` int64 of `logits[R, vocabulary]` float32; for a row without one `NO_TOKEN` or
        `ALL_EXCLUDED`. The logits are undefined afterwards unless a row reports log probabilities."""
        if sampling.is_greedy:
            return choose_greedily(logits)
        if self._sampler is not None:
            return self._sampler.sample(logits, sampling, may_change=not sampling.reporting)
        token_ids = sample(logits, sampling.rows())
        return name_excluded(token_ids, logits) if sampling.excludes else token_ids
