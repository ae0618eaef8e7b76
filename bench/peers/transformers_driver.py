"""A driver of `transformers` on its own, on a GPU where torch finds one: static batches with `generate`, which also
serve models with recurrent state, or its continuous batching.

It runs in our own environment, which has the library anyway.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BatchEncoding,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteriaList,
)
from transformers import __version__ as transformers_version

from inflight.bench.peers.driver import DrivenEngine, Request, Setup, TokenBatch, serve

PAD_ID = 0
# Continuous batching counts pages of so many tokens; small ones waste little on short requests.
PAGE_TOKENS = 32
MAX_BATCH_TOKENS = 2048
# Bounds the wait for an answer where nothing else does, so that a dead thread is found out.
LONGEST_WAIT_S = 60.0


class StaticEngine:
    """`generate` on the waiting requests, up to a batch. It ends with its longest answer; none joins before."""

    def __init__(self, model: Any, setup: Setup) -> None:
        self._model = model
        self._batch_size = setup.seats
        self._waiting: deque[Request] = deque()
        self._num_steps = 0

    def describe(self) -> dict[str, str]:
        return words_of(self._model, f"generate, batches of {self._batch_size}")

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def advance(self, wait_s: float | None) -> list[TokenBatch]:
        """Computes one whole batch."""
        batch = [self._waiting.popleft() for _ in range(min(self._batch_size, len(self._waiting)))]
        times = StepTimes()
        longest = max(len(request.prompt_ids) for request in batch)
        padding = [longest - len(request.prompt_ids) for request in batch]
        inputs = BatchEncoding(
            {
                "input_ids": [[PAD_ID] * pad + r.prompt_ids for pad, r in zip(padding, batch, strict=True)],
                "attention_mask": [[0] * pad + [1] * (longest - pad) for pad in padding],
            },
            tensor_type="pt",
        ).to(self._model.device)
        config = GenerationConfig(
            max_new_tokens=max(request.output_tokens for request in batch), do_sample=False, pad_token_id=PAD_ID
        )
        self._model.generate(**inputs, generation_config=config, stopping_criteria=StoppingCriteriaList([times]))
        self._num_steps += len(times.at)
        return [
            TokenBatch(at, [(request.id, 1) for request in batch if index < request.output_tokens])
            for index, at in enumerate(times.at)
        ]

    def figures(self) -> dict[str, float]:
        num_steps, self._num_steps = self._num_steps, 0
        return {"num_steps": num_steps}


class StepTimes:
    """A criterion that stops nothing and notes when each step came to its end."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Called by `generate` after each step, with a row for each sequence."""
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        self.at.append(time.monotonic())
        return input_ids.new_zeros(input_ids.shape[0], dtype=bool)


class ContinuousEngine:
    """The library's own continuous batching, which runs on a thread. Its cache holds the longest request on every seat:
    by default it takes most of the memory."""

    def __init__(self, model: Any, setup: Setup) -> None:
        self._model = model
        num_pages = setup.seats * -(-setup.max_request_tokens // PAGE_TOKENS)
        self._batching = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=PAD_ID),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=num_pages,
                max_batch_tokens=MAX_BATCH_TOKENS,
                max_requests_per_batch=setup.seats,
            ),
        )
        self._batching.start()
        self._num_seen: dict[str, int] = {}
        # The library keys what it holds by id, which must differ from run to run.
        self._run = 0

    def describe(self) -> dict[str, str]:
        return words_of(self._model, "its continuous batching")

    def add(self, request: Request) -> None:
        name = f"{self._run}-{request.id}"
        self._num_seen[name] = 0
        self._batching.add_request(
            request.prompt_ids, request_id=name, max_new_tokens=request.output_tokens, streaming=True, eos_token_id=-1
        )

    def advance(self, wait_s: float | None) -> list[TokenBatch]:
        """What has come; waits for the first of it."""
        result = self._batching.get_result(timeout=LONGEST_WAIT_S if wait_s is None else max(wait_s, 0.001))
        if result is None:
            if not self._batching.is_running():
                raise RuntimeError("continuous batching has ended")
            return []
        if result.error is not None:
            raise RuntimeError(result.error)
        number = len(result.generated_tokens) - self._num_seen[result.request_id]
        self._num_seen[result.request_id] += number
        return [TokenBatch(time.monotonic(), [(int(result.request_id.partition("-")[2]), number)])] if number else []

    def figures(self) -> dict[str, float]:
        self._run += 1
        self._num_seen.clear()
        return {}

    def close(self) -> None:
        """Ends its thread."""
        self._batching.stop(block=True)


def words_of(model: Any, mode: str) -> dict[str, str]:
    """What runs, in words."""
    return {"engine": f"transformers {transformers_version}", "mode": mode, "device": model.device.type}


def make_engine(setup: Setup) -> DrivenEngine:
    """Returns the engine of a variant."""
    model: Any = AutoModelForCausalLM.from_pretrained(setup.model, dtype=setup.dtype, attn_implementation="sdpa")
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    model.generation_config = GenerationConfig()
    return StaticEngine(model, setup) if setup.variant == "static" else ContinuousEngine(model, setup)


if __name__ == "__main__":
    sys.exit(serve(make_engine))
