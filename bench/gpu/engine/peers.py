"""The same network served by transformers itself: static batches by `generate`, and its continuous batching."""

from __future__ import annotations

import time
from collections.abc import Sequence as ReadOnlyList
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from inflight.bench.gpu.engine.serving import Served, TimedRequest
from inflight.executor.checkpoint.quiet import quiet_transformers

TIMEOUT_S = 600.0
PAD_ID = 0


def serve_static(network: Any, requests: ReadOnlyList[TimedRequest], max_num_sequences: int) -> Served:
    """Batches in order of arrival; each ends with its longest answer, and only tokens asked for count.

    A batch starts when its last request has arrived. `generate` hands out nothing before its end.
    """
    served, began_s = Served(), time.perf_counter()
    for first in range(0, len(requests), max_num_sequences):
        batch = requests[first : first + max_num_sequences]
        _wait_until(began_s + max(request.arrival_s for request in batch))
        token_ids, mask = _left_padded(batch, network.device)
        with torch.inference_mode(), quiet_transformers():
            network.generate(
                token_ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max(request.output_tokens for request in batch),
                eos_token_id=None,
                pad_token_id=PAD_ID,
            )
        ended_s = time.perf_counter()
        served.first_token_s += [ended_s - began_s - request.arrival_s for request in batch]
        served.output_tokens += sum(request.output_tokens for request in batch)
    served.total_s = time.perf_counter() - began_s
    return served


def serve_continuous(network: Any, requests: ReadOnlyList[TimedRequest], max_num_sequences: int) -> Served:
    """Transformers' continuous batching with its own defaults, except for the number of requests in a batch."""
    from transformers import ContinuousBatchingConfig

    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=PAD_ID, max_new_tokens=1)
    with quiet_transformers():
        batching = network.init_continuous_batching(
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(max_requests_per_batch=max_num_sequences),
        )
        batching.start()
        try:
            _compute_once(batching)
            return _send_and_wait(batching, requests)
        finally:
            batching.stop(block=True, timeout=TIMEOUT_S)


def _compute_once(batching: Any) -> None:
    """A short request, so that what is made at the first step is not in the times."""
    batching.add_request(list(range(3, 20)), request_id="first", max_new_tokens=8)
    if batching.get_result(timeout=TIMEOUT_S) is None:
        raise RuntimeError("transformers' continuous batching ended without an answer")


def _send_and_wait(batching: Any, requests: ReadOnlyList[TimedRequest]) -> Served:
    served, began_s = Served(), time.perf_counter()
    for number, request in enumerate(sorted(requests, key=lambda request: request.arrival_s)):
        _wait_until(began_s + request.arrival_s)
        batching.add_request(
            list(request.prompt_ids),
            request_id=str(number),
            max_new_tokens=request.output_tokens,
            record_timestamps=True,
        )
    arrivals_s = sorted(request.arrival_s for request in requests)
    for _ in requests:
        result = batching.get_result(timeout=TIMEOUT_S)
        if result is None or result.error is not None:
            raise RuntimeError(f"transformers' continuous batching failed: {result and result.error}")
        served.output_tokens += len(result.generated_tokens)
        times_s = list(result.timestamps or ())
        if times_s:
            served.first_token_s.append(times_s[0] - began_s - arrivals_s[int(result.request_id)])
            served.between_tokens_s += [later - sooner for sooner, later in pairwise(times_s)]
    served.total_s = time.perf_counter() - began_s
    return served


def _left_padded(batch: ReadOnlyList[TimedRequest], device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(len(request.prompt_ids) for request in batch)
    token_ids = torch.full((len(batch), longest), PAD_ID)
    mask = torch.zeros((len(batch), longest), dtype=torch.long)
    for row, request in enumerate(batch):
        token_ids[row, longest - len(request.prompt_ids) :] = torch.tensor(list(request.prompt_ids))
        mask[row, longest - len(request.prompt_ids) :] = 1
    return token_ids.to(device), mask.to(device)


def _wait_until(at_s: float) -> None:
    remaining_s = at_s - time.perf_counter()
    if remaining_s > 0:
        time.sleep(remaining_s)
