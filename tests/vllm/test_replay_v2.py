"""The logits processor for vLLM's second model runner, on a batch as that has it. Only its base class is a stand-in."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from inflight.executor.vllm.parameters import REPLAYED_OUTPUT

INTERFACE = "vllm.v1.worker.gpu.sample.logits_processor"
VOCABULARY = 8
PROMPT_LENGTHS = {0: 5, 2: 3, 3: 4}


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    parts = INTERFACE.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    vllm: Any = sys.modules[INTERFACE]
    vllm.LogitsProcessor = type("LogitsProcessor", (), {"__init__": lambda self, config, states: None})
    module = importlib.import_module("inflight.executor.vllm.replay_v2")
    lengths = np.zeros(4, dtype=np.int32)
    for slot, length in PROMPT_LENGTHS.items():
        lengths[slot] = length
    yield module.ReplayedOutput(None, SimpleNamespace(prompt_len=SimpleNamespace(np=lengths)))
    del sys.modules["inflight.executor.vllm.replay_v2"]


def parameters(*replayed: int) -> Any:
    return SimpleNamespace(extra_args={REPLAYED_OUTPUT: list(replayed)} if replayed else None)


def applied(processor: Any, lengths: dict[int, int]) -> list[int | None]:
    """For each row the only token that is left, None where all are. `lengths` are the tokens so far, by slot."""
    slots, seen = np.array(list(lengths)), np.array(list(lengths.values()))
    context = SimpleNamespace(idx_mapping_np=slots, seq_lens_upper_bound_np=seen)
    logits = processor.apply(torch.linspace(-3, 3, VOCABULARY).repeat(len(slots), 1), context)
    left = [[token for token, value in enumerate(row) if value > -math.inf] for row in logits.tolist()]
    assert all(len(tokens) in (1, VOCABULARY) for tokens in left)
    return [tokens[0] if len(tokens) == 1 else None for tokens in left]


def test_tokens_are_forced_in_order_and_no_more_after_the_last(processor: Any) -> None:
    assert processor.add_request(2, parameters(6, 1))
    assert not processor.add_request(0, parameters())
    # The prompt of slot 2 is not complete, then it is, then there are outputs.
    assert [applied(processor, {0: 5, 2: length}) for length in (2, 3, 4, 5)] == [
        [None, None],
        [None, 6],
        [None, 1],
        [None, None],
    ]


def test_rows_are_found_by_their_slots_in_any_order(processor: Any) -> None:
    processor.add_request(0, parameters(4, 5))
    processor.add_request(3, parameters(7))
    assert applied(processor, {3: 4, 2: 3, 0: 6}) == [7, None, 5]


def test_slot_of_another_request_forces_nothing(processor: Any) -> None:
    processor.add_request(2, parameters(6, 1))
    processor.add_request(2, parameters())
    assert applied(processor, {2: 3}) == [None]


def test_request_that_returns_after_a_preemption_goes_on_where_it_was(processor: Any) -> None:
    processor.add_request(3, parameters(6, 1, 2))
    assert applied(processor, {3: 4}) == [6]
    processor.add_request(3, parameters(6, 1, 2))
    assert applied(processor, {3: 6}) == [2]
