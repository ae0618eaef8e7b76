"""A driver of transformers itself, on a GPU where torch finds one: its continuous batching, or static batches by
`generate`, which also serve models with recurrent state. Greedy. Runs in inflight's own environment."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from inflight.bench.peers.driver import CannotRun, DrivenEngine, Request, Setup, TokenBatch, serve

PAD_ID = 0
# Longer than any step.
TIMEOUT_S = 600.0


class ContinuousEngine:
    """Continuous batching with its own defaults, except for the number of requests in a batch, and on a CPU of blocks:
    by default the cache takes most of a machine's memory."""

    def __init__(self, setup: Setup) -> None:
        network, self._words = _load(setup)
        self._num_received: dict[int, int] = {}
        if not hasattr(network, "init_continuous_batching"):
            raise CannotRun("this version of transformers has no continuous batching")
        self._batching = network.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=PAD_ID),
            continuous_batching_config=ContinuousBatchingConfig(
                max_requests_per_batch=setup.seats,
                num_blocks=None if torch.cuda.is_available() else setup.seats * _num_blocks(setup),
            ),
        )
        self._batching.start()
        # What is made at the first step is not in the times.
        self.add(Request(0, list(range(3, 20)), 8, 0.0))
        while self._num_received[0] < 8:
            self.advance(None)

    def describe(self) -> dict[str, str]:
        return self._words

    def add(self, request: Request) -> None:
        self._num_received[request.id] = 0
        self._batching.add_request(
            request.prompt_ids, request_id=str(request.id), max_new_tokens=request.output_tokens, streaming=True
        )

    def advance(self, wait_s: float | None) -> list[TokenBatch]:
        """Waits for one result, and takes those that are there too."""
        result, tokens = self._batching.get_result(timeout=TIMEOUT_S if wait_s is None else wait_s), []
        at_s = time.monotonic()
        while result is not None:
            if result.error is not None:
                raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
            number = int(result.request_id)
            num_new = len(result.generated_tokens) - self._num_received[number]
            if num_new > 0:
                self._num_received[number] += num_new
                tokens.append((number, num_new))
            result = self._batching.get_result(timeout=0.0)
        if wait_s is None and not tokens:
            raise RuntimeError(f"transformers' continuous batching produced nothing in {TIMEOUT_S:.0f} s")
        return [TokenBatch(at_s, tokens)] if tokens else []

    def figures(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Ends its thread."""
        self._batching.stop(block=True)


class StaticEngine:
    """Static batches in order of arrival: each ends with its longest output."""

    def __init__(self, setup: Setup) -> None:
        self._network, self._words = _load(setup)
        self._seats = setup.seats
        self._waiting: deque[Request] = deque([Request(0, list(range(3, 20)), 2, 0.0)])
        self.advance(None)

    def describe(self) -> dict[str, str]:
        return self._words

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def advance(self, wait_s: float | None) -> list[TokenBatch]:
        """Serves a batch. `generate` gives its tokens at its end."""
        batch = [self._waiting.popleft() for _ in range(min(self._seats, len(self._waiting)))]
        longest = max(len(request.prompt_ids) for request in batch)
        token_ids = torch.full((len(batch), longest), PAD_ID)
        mask = torch.zeros_like(token_ids)
        for row, request in enumerate(batch):
            token_ids[row, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, longest - len(request.prompt_ids) :] = 1
        with torch.inference_mode():
            self._network.generate(
                token_ids.to(self._network.device),
                attention_mask=mask.to(self._network.device),
                do_sample=False,
                max_new_tokens=max(request.output_tokens for request in batch),
                eos_token_id=None,
                pad_token_id=PAD_ID,
            )
        return [TokenBatch(time.monotonic(), [(request.id, request.output_tokens) for request in batch])]

    def figures(self) -> dict[str, float]:
        return {}


def _num_blocks(setup: Setup) -> int:
    page_size = ContinuousBatchingConfig().page_size
    return -(-setup.max_request_tokens // page_size)


def _load(setup: Setup) -> tuple[Any, dict[str, str]]:
    torch.set_num_threads(setup.num_threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, setup.dtype)
    network: Any = AutoModelForCausalLM.from_pretrained(setup.model, dtype=dtype, attn_implementation="sdpa")
    engine = f"transformers {transformers.__version__}, torch {torch.__version__}"
    words = {"engine": engine, "device": device, "dtype": setup.dtype, "batching": setup.variant}
    return network.to(device).eval(), words


def make_engine(setup: Setup) -> DrivenEngine:
    """Returns the engine of the variant."""
    return StaticEngine(setup) if setup.variant == "static" else ContinuousEngine(setup)


if __name__ == "__main__":
    sys.exit(serve(make_engine))
