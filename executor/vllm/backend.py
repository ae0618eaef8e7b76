"""What the executor needs of vLLM: the seam between `VllmEngine` and `inflight.executor.vllm.internals`.

Plain data and a protocol. Nothing here imports vLLM, so the engine is tested with a fake that passes the same contract
as the real one (`tests/vllm/contract.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from inflight.executor.scheduler.sequence import TokenLogprobs


class BackendLostError(Exception):
    """vLLM's engine process has died. It serves nothing any more."""


class RefusedError(Exception):
    """vLLM refuses a request. The text is vLLM's own."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of a started vLLM. `num_blocks` are the KV blocks that requests can use, of `block_size` tokens.

    `dtype`, `weight_dtype` and `kv_cache_dtype` are names, such as `bfloat16`. `can_replay`: it can generate given
    tokens (`parameters.REPLAYED_OUTPUT`). `num_adapter_slots` LoRA adapters can be loaded at once.
    """

    version: str
    block_size: int
    num_blocks: int
    max_num_sequences: int
    max_num_tokens: int
    context_length: int
    vocabulary_size: int
    dtype: str
    weight_dtype: str
    kv_cache_dtype: str
    device: str
    tensor_parallel_size: int = 1
    can_replay: bool = False
    num_adapter_slots: int = 0


@dataclass(frozen=True, slots=True)
class Produced:
    """What a request got in a step, or in several whose output was not taken in between.

    `logprobs` belong to `token_ids`, and are empty if none were asked for. `prompt_logprobs[i]` belongs to prompt token
    `i + 1`. `finish_reason` is vLLM's: `stop`, `length`, `abort`, `error` or `repetition`; None: it goes on.
    """

    token_ids: tuple[int, ...]
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class StepStats:
    """vLLM's scheduler after a step. `kv_usage` is the share of the KV blocks in use, 0 to 1.

    The rest counts this step only: tokens of prompts that were computed, prompt tokens that were looked up and found in
    the prefix cache, preemptions, and by position in a draft the tokens that were drafted and accepted.
    """

    num_running: int
    num_waiting: int
    kv_usage: float
    num_prompt_tokens: int = 0
    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    num_preemptions: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()


class Backend(Protocol):
    """A started vLLM. Everything happens on the event loop."""

    @property
    def facts(self) -> Facts:
        """Its properties."""
        ...

    def watch_steps(self, on_step: Callable[[StepStats], None]) -> None:
        """Calls `on_step` after every step. What requests got in it was taken, or will be before anything that is
        scheduled from here on."""
        ...

    def watch_cache(self, on_change: Callable[[int], None]) -> None:
        """Calls `on_change` with the number of blocks in the prefix cache, whether a request uses them or not, when it
        changes. Never, if vLLM does not say it."""
        ...

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        parameters: Mapping[str, Any],
        cache_salt: str | None,
        take: Callable[[Produced], None],
        adapter_slot: int | None = None,
        priority: int = 0,
    ) -> None:
        """Generates with these keywords of `SamplingParams`, and with the adapter in a slot. Calls `take`, which must
        not raise, with what the request gets, and returns after its end. Of the requests that wait for a seat, those of
        the smallest `priority` get it first. Cancelling it aborts the request: its blocks are free after the next step,
        and `take` may be called once more. Raises `RefusedError` and `BackendLostError`."""
        ...

    async def load_adapter(self, slot: int, name: str, folder: Path) -> None:
        """Loads a LoRA adapter of PEFT's form in place of the one in the slot, which no request uses. `name` is unlike
        that of any other content. Raises `RefusedError`."""
        ...

    async def remove_adapter(self, slot: int) -> None:
        """Empties a slot that no request uses."""
        ...

    async def wait_until_lost(self) -> None:
        """Returns when the engine has died."""
        ...

    def close(self) -> None:
        """Ends the engine."""
        ...
