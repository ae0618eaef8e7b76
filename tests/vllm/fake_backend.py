"""A `Backend` without vLLM: its next token is a hash of those before. It passes the contract of the real one."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inflight.executor.scheduler.sequence import TokenLogprobs
from inflight.executor.vllm.backend import BackendLostError, Facts, Produced, RefusedError, StepStats
from inflight.executor.vllm.parameters import REPLAYED_OUTPUT

FACTS = Facts(
    version="0.0",
    block_size=4,
    num_blocks=32,
    max_num_sequences=2,
    max_num_tokens=64,
    context_length=64,
    vocabulary_size=512,
    dtype="float32",
    weight_dtype="float32",
    kv_cache_dtype="float32",
    device="fake",
    can_replay=True,
    num_adapter_slots=1,
)


def next_token(token_ids: list[int], vocabulary_size: int = FACTS.vocabulary_size, adapter: str = "") -> int:
    """The greedy token."""
    digest = hashlib.sha256(f"{token_ids}{adapter}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % vocabulary_size


def greedy(prompt_ids: list[int], num_tokens: int, adapter: str = "") -> list[int]:
    """The greedy output, with an adapter of this name."""
    token_ids = list(prompt_ids)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, adapter=adapter))
    return token_ids[len(prompt_ids) :]


@dataclass(eq=False)
class FakeRequest:
    """A request and what its reader has not taken yet."""

    name: str
    token_ids: list[int]
    num_prompt_tokens: int
    parameters: Mapping[str, Any]
    num_cached_tokens: int
    adapter: str = ""
    priority: int = 0
    ready: asyncio.Queue[Produced | Exception] = field(default_factory=asyncio.Queue)
    is_preempted: bool = False


class FakeBackend:
    """Makes a step when `step` is called, or, if it is `automatic`, whenever there is work."""

    def __init__(self, *, automatic: bool = False, facts: Facts = FACTS) -> None:
        self._facts = facts
        self._on_step: list[Callable[[StepStats], None]] = []
        self._on_cache: list[Callable[[int], None]] = []
        self._automatic = automatic
        self._lost = asyncio.Event()
        self._cached: dict[str | None, list[tuple[int, ...]]] = {}
        self.requests: list[FakeRequest] = []
        self.adapters: dict[int, str] = {}
        self.num_preemptions = 0

    @property
    def facts(self) -> Facts:
        """See `Backend`."""
        return self._facts

    def watch_steps(self, on_step: Callable[[StepStats], None]) -> None:
        """See `Backend`."""
        self._on_step.append(on_step)

    def watch_cache(self, on_change: Callable[[int], None]) -> None:
        """See `Backend`."""
        self._on_cache.append(on_change)

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
        """See `Backend`."""
        if self._lost.is_set():
            raise BackendLostError
        if not 0 <= parameters["temperature"] <= 2:
            raise RefusedError("temperature must be in [0, 2]")
        known = self._cached.setdefault(cache_salt, [])
        num_cached = 0 if parameters.get("skip_reading_prefix_cache") else self._num_cached(known, prompt_ids)
        known.append(tuple(prompt_ids))
        adapter = "" if adapter_slot is None else self.adapters[adapter_slot]
        request = FakeRequest(
            request_id, list(prompt_ids), len(prompt_ids), parameters, num_cached, adapter, priority=priority
        )
        self.requests.append(request)
        if self._automatic:
            asyncio.get_running_loop().call_soon(self._step_on)
        try:
            while True:
                produced = await request.ready.get()
                if isinstance(produced, Exception):
                    raise produced
                take(produced)
                if produced.finish_reason is not None:
                    return
        finally:
            if request in self.requests:
                self.requests.remove(request)

    def _num_cached(self, known: list[tuple[int, ...]], prompt_ids: list[int]) -> int:
        longest = 0
        for other in known:
            pairs = enumerate(zip(other, prompt_ids, strict=False))
            shared = next((i for i, (a, b) in pairs if a != b), min(len(other), len(prompt_ids)))
            longest = max(longest, min(shared, len(prompt_ids) - 1))
        return longest // self._facts.block_size * self._facts.block_size

    def _step_on(self) -> None:
        if self.requests:
            self.step()
            asyncio.get_running_loop().call_soon(self._step_on)

    @property
    def running(self) -> list[FakeRequest]:
        """The requests in the batch: those that have begun, then by priority and arrival."""
        known = [one for one in self.requests if not one.is_preempted]
        known.sort(key=lambda one: one.priority if len(one.token_ids) == one.num_prompt_tokens else -math.inf)
        return known[: self._facts.max_num_sequences]

    def step(self) -> None:
        """Computes a token of each running request. Readers take them afterwards."""
        running = self.running
        num_prompt_tokens = 0
        for request in running:
            is_first = len(request.token_ids) == request.num_prompt_tokens
            num_prompt_tokens += request.num_prompt_tokens - request.num_cached_tokens if is_first else 0
            request.ready.put_nowait(self._produce(request, is_first=is_first))
            if request.ready.qsize() and self._finish_reason(request) is not None:
                self.requests.remove(request)
        used = sum(-(-len(one.token_ids) // self._facts.block_size) for one in self.running)
        num_running = len(self.running)
        stats = StepStats(
            num_running=num_running,
            num_waiting=len(self.requests) - num_running,
            kv_usage=used / self._facts.num_blocks,
            num_prompt_tokens=num_prompt_tokens,
            num_preemptions=self.num_preemptions,
        )
        self.num_preemptions = 0
        for call in self._on_step:
            call(stats)
        for report in self._on_cache:
            report(self._num_published_blocks())

    def _num_published_blocks(self) -> int:
        """Distinct full blocks of what was computed."""
        size = self._facts.block_size
        known = {(salt, one) for salt, prompts in self._cached.items() for one in prompts}
        return len({(salt, one[:end]) for salt, one in known for end in range(size, len(one) + 1, size)})

    def _produce(self, request: FakeRequest, *, is_first: bool) -> Produced:
        parameters = request.parameters
        token_id = next_token(request.token_ids, self._facts.vocabulary_size, request.adapter)
        while token_id in self._excluded(request):
            token_id = (token_id + 1) % self._facts.vocabulary_size
        replayed = parameters.get("extra_args", {}).get(REPLAYED_OUTPUT, ())
        num_output = len(request.token_ids) - request.num_prompt_tokens
        token_id = replayed[num_output] if num_output < len(replayed) else token_id
        request.token_ids.append(token_id)
        num_top, num_prompt_top = parameters.get("logprobs"), parameters.get("prompt_logprobs")
        prompt = request.token_ids[1 : request.num_prompt_tokens]
        return Produced(
            (token_id,),
            request.num_cached_tokens,
            () if num_top is None else (_logprobs(token_id, num_top),),
            tuple(_logprobs(one, num_prompt_top) for one in prompt) if is_first and num_prompt_top is not None else (),
            self._finish_reason(request),
        )

    def _excluded(self, request: FakeRequest) -> set[int]:
        output = request.token_ids[request.num_prompt_tokens :]
        words = request.parameters.get("_bad_words_token_ids", ())
        ends = {word[-1] for word in words if word[:-1] == output[len(output) - len(word) + 1 :] or len(word) == 1}
        return ends | {one for one, bias in request.parameters.get("logit_bias", {}).items() if bias <= -100}

    def _finish_reason(self, request: FakeRequest) -> str | None:
        if request.token_ids[-1] in request.parameters["stop_token_ids"]:
            return "stop"
        num_tokens = len(request.token_ids) - request.num_prompt_tokens
        return "length" if num_tokens == request.parameters["max_tokens"] else None

    def preempt(self, name: str) -> None:
        """Takes a request out of the batch until `resume`."""
        next(one for one in self.requests if one.name == name).is_preempted = True
        self.num_preemptions += 1

    def resume(self, name: str) -> None:
        """Takes it into the batch again."""
        next(one for one in self.requests if one.name == name).is_preempted = False

    def die(self) -> None:
        """Loses the engine."""
        self._lost.set()
        for request in self.requests:
            request.ready.put_nowait(BackendLostError())

    async def load_adapter(self, slot: int, name: str, folder: Path) -> None:
        """See `Backend`."""
        if not (folder / "adapter_model.safetensors").stat().st_size:
            raise RefusedError("there are no weights")
        self.adapters[slot] = name

    async def remove_adapter(self, slot: int) -> None:
        """See `Backend`."""
        self.adapters.pop(slot, None)

    async def wait_until_lost(self) -> None:
        """See `Backend`."""
        await self._lost.wait()

    def close(self) -> None:
        """See `Backend`."""


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """The token is the likeliest."""
    others = [one for one in range(num_top) if one != token_id][: max(0, num_top - 1)]
    top = (token_id, *others)[:num_top]
    return TokenLogprobs(-0.5, top, tuple(-0.5 - i for i in range(len(top))), 1)
