"""Requests with penalties, bans and min_p get the same tokens however they are batched, and those of transformers."""

from __future__ import annotations

import itertools
import queue
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from inflight.common.model_source import resolve_model
from inflight.executor.engine.engine import Engine
from inflight.executor.engine.output import EngineOutput
from inflight.executor.forward.native import NativeForward
from inflight.executor.forward.transformers import TransformersForward
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.limits import Overcommit
from inflight.executor.scheduler.max_utilization import MaxUtilization
from inflight.executor.scheduler.plan_builder import StepBuilder
from inflight.executor.scheduler.scheduler import (
    INVALID_LOGITS,
    NOTHING_ALLOWED,
    Scheduler,
    SchedulerLimits,
    SchedulerPolicy,
)
from inflight.executor.scheduler.sequence import FinishEvent, FinishReason, Processors, Sampling, Stopping
from inflight.executor.scheduler.sequence import Sequence as Request
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE, save_model, sizes
from tests.support.device.torch_threads import torch_threads
from tests.support.scheduler.scheduling import make_limits

# The C++ code has blocks of 16 and more.
BLOCK_SIZES = {"cpu": 16, "reference": 4}
NUM_TOKENS = 8000
CROWD = 32
EOS = 2
GREEDY = Sampling(0.0, 0, 1.0, 0)
ALONE = make_limits(max_num_sequences=1, num_standby_sequences=CROWD, max_num_tokens=128, context_length=128)
BATCH = replace(ALONE, max_num_sequences=CROWD)
CHUNKED = replace(ALONE, max_num_sequences=7, max_num_tokens=9)
PREEMPTING = replace(
    BATCH,
    policy=SchedulerPolicy.MAX_UTILIZATION,
    overcommit=Overcommit(watermark=0.0, margin=0.0, max_steps_away=10**6),
)


@dataclass(frozen=True)
class Ride:
    """The ends of some requests, and how often a sequence was preempted."""

    ends: dict[str, FinishEvent]
    num_preemptions: int

    @property
    def tokens(self) -> dict[str, tuple[list[int], FinishReason]]:
        return {name: (output_of(event.sequence), event.reason) for name, event in self.ends.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(LlamaConfig(**sizes()), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module", params=["cpu", "reference"])
def model(request: pytest.FixtureRequest, folder: Path) -> Iterator[PagedModel]:
    with torch_threads(1), pytest.MonkeyPatch.context() as patch:
        if request.param == "reference":
            patch.setattr("inflight.executor.model.loader._native_sampler", lambda *_: None)
        loaded = load_model(
            resolve_model(str(folder)), dtype_name="float32", device_name="cpu", backend_name=request.param
        )
        block_size = BLOCK_SIZES[request.param]
        loaded.allocate_kv(NUM_TOKENS // block_size, block_size)
        yield loaded


def block_size_of(model: PagedModel) -> int:
    return BLOCK_SIZES["cpu" if isinstance(model.forward, NativeForward) else "reference"]


def request_of(name: str, prompt: list[int], output: Sequence[int] = (), **fields: Any) -> Request:
    """A request that reserves all that it can need. It may continue after output of an earlier attempt."""
    stopping = fields.setdefault("stopping", Stopping(20, 0, frozenset()))
    fields.setdefault("sampling", GREEDY)
    num_blocks = -(-(len(prompt) + stopping.max_tokens) // min(BLOCK_SIZES.values()))
    ids = [*prompt, *output]
    return Request(name, 1, ids, len(prompt), num_reserved_blocks=num_blocks, cache_salt=b"", **fields)


def crowd() -> list[Request]:
    """Random requests over all features, most of them with several. Prompts share beginnings."""
    some = random.Random(7)

    def maybe(value: Any, neutral: Any) -> Any:
        return value if some.random() < 0.5 else neutral

    def ids(count: int) -> list[int]:
        return some.sample(range(VOCABULARY_SIZE), count)

    made = []
    for i in range(CROWD):
        processors = Processors(
            bias=maybe(tuple((token_id, some.uniform(-5, 5)) for token_id in ids(6)), ()),
            allowed_ids=maybe(frozenset(ids(60)), frozenset()),
            repetition_penalty=maybe(some.choice([0.8, 1.3]), 1.0),
            frequency_penalty=maybe(some.uniform(-0.5, 1.5), 0.0),
            presence_penalty=maybe(some.uniform(-0.5, 1.5), 0.0),
            bad_words=maybe(tuple(tuple(ids(length)) for length in (1, 1, 2, 2)), ()),
            no_repeat_ngram_size=maybe(some.choice([2, 3]), 0),
        )
        sampling = Sampling(maybe(0.9, 0.0), maybe(20, 0), maybe(0.9, 1.0), 1000 + i, maybe(0.05, 0.0))
        prompt = [3 + (7 * j) % 90 for j in range(12 * (i % 3))] + [5 + i, 9]
        stopping = Stopping(some.randint(8, 30), maybe(6, 0), frozenset(range(4 * (i % 2))))
        made.append(request_of(f"r{i}", prompt, sampling=sampling, stopping=stopping, processors=processors))
    return made


def output_of(sequence: Request) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :]


def ride(
    model: PagedModel,
    requests: list[Request],
    limits: SchedulerLimits = BATCH,
    overlap: bool = True,
) -> Ride:
    """What requests that arrive at once get."""
    outputs: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
    block_size = block_size_of(model)
    runner = ModelRunner(model, limits, block_size)
    scheduler = Scheduler(limits, BlockPool(NUM_TOKENS // block_size, block_size))
    engine = Engine(scheduler, runner, outputs.put, lambda error: None, overlap=overlap)
    for request in requests:
        engine.submit(request)
    engine.start()
    ends: dict[str, FinishEvent] = {}
    while len(ends) < len(requests):
        ends |= {event.sequence.request_id: event for event in outputs.get(timeout=60).finished}
    engine.stop()
    runner.close()
    scheduler.check_when_idle()
    return Ride(ends, scheduler.num_preemptions)


@pytest.fixture(scope="module")
def alone(model: PagedModel) -> Ride:
    """Each request by itself, one step at a time."""
    return ride(model, crowd(), ALONE, overlap=False)


@pytest.mark.parametrize(
    ("limits", "overlap"),
    [(ALONE, True), (BATCH, False), (CHUNKED, True)],
    ids=["alone-overlapped", "batch-in-turn", "chunked-overlapped"],
)
def test_tokens_do_not_depend_on_the_batch(
    model: PagedModel, alone: Ride, limits: SchedulerLimits, overlap: bool
) -> None:
    assert ride(model, crowd(), limits, overlap).tokens == alone.tokens
    assert {reason for _, reason in alone.tokens.values()} <= {FinishReason.STOP_TOKEN, FinishReason.LENGTH}


def preempt_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every other decode lose its seat at every third step, whether or not blocks are missing."""
    decodes, steps = MaxUtilization.decodes, itertools.count()

    def decodes_after_some_preemptions(self: MaxUtilization, builder: StepBuilder) -> Iterable[Request]:
        if next(steps) % 3 == 0:
            for victim in list(self._queues.decodes)[::2]:
                self._queues.pause(victim)
        for sequence in [some for some in self._queues.pausing if some.num_in_flight == 0]:
            self._preempt(sequence, 1, builder)
        return decodes(self, builder)

    monkeypatch.setattr(MaxUtilization, "decodes", decodes_after_some_preemptions)


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlapped"])
@pytest.mark.parametrize("num_host_blocks", [0, 200], ids=["recomputed", "copied-back"])
def test_preemption_every_few_tokens_changes_no_token(
    model: PagedModel, alone: Ride, overlap: bool, num_host_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempt_often(monkeypatch)
    found = ride(model, crowd(), replace(PREEMPTING, num_host_blocks=num_host_blocks), overlap)
    assert found.tokens == alone.tokens
    assert found.num_preemptions > 2 * CROWD


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_resume_with_the_output_so_far_continues_with_the_same_tokens(
    model: PagedModel, alone: Ride, share: float
) -> None:
    requests = []
    for request in crowd():
        done = output_of(alone.ends[request.request_id].sequence)
        request.token_ids.extend(done[: int(share * len(done))])
        requests.append(request)
    assert ride(model, requests).tokens == alone.tokens


@pytest.mark.parametrize("seed", range(4))
def test_greedy_output_equals_the_generate_of_transformers(model: PagedModel, folder: Path, seed: int) -> None:
    some = random.Random(seed)
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # Given bad words that begin with ids which the prompt does not have
    prompt = [some.randrange(3, 40) for _ in range(11)]
    bias = {some.randrange(VOCABULARY_SIZE): some.uniform(-6, 6) for _ in range(10)} | {EOS: 3.0}
    bad_words = [[some.randrange(40, 96) for _ in range(length)] for length in (1, 1, 1, 2, 2, 3)]
    options: dict[str, dict[str, Any]] = {
        "none": {},
        "penalty": {"repetition_penalty": 1.4},
        "reward": {"repetition_penalty": 0.7},
        "words": {"bad_words_ids": bad_words},
        "ngrams": {"no_repeat_ngram_size": 2},
        "least": {"min_new_tokens": 9, "sequence_bias": {(EOS,): 9.0}},
        "bias": {"sequence_bias": {(token_id,): value for token_id, value in bias.items()}},
    }
    options["all"] = {name: value for some in options.values() for name, value in some.items()}

    def ours(name: str) -> Request:
        of = options[name]
        processors = Processors(
            bias=tuple((token_ids[0], value) for token_ids, value in of.get("sequence_bias", {}).items()),
            repetition_penalty=of.get("repetition_penalty", 1.0),
            bad_words=tuple(tuple(word) for word in of.get("bad_words_ids", ())),
            no_repeat_ngram_size=of.get("no_repeat_ngram_size", 0),
        )
        stopping = Stopping(40, of.get("min_new_tokens", 0), frozenset({EOS}))
        return request_of(name, prompt, stopping=stopping, processors=processors)

    found = ride(model, [ours(name) for name in options]).tokens

    for name, of in options.items():
        ids = torch.tensor([prompt])
        theirs = network.generate(ids, do_sample=False, max_new_tokens=40, attention_mask=torch.ones_like(ids), **of)
        assert found[name][0] == theirs[0, len(prompt) :].tolist(), name
    assert len({tuple(ids) for ids, _ in found.values()}) > 4, "the options make a difference"


def test_request_that_excludes_every_token_ends_with_an_error_and_the_others_do_not(model: PagedModel) -> None:
    # Given requests that run out of tokens at the first, at the third, and where only a stop token is left
    prompt = [5, 9, 11]
    excluding = {
        "at once": request_of("at once", prompt, processors=Processors(bad_words=tuple((i,) for i in range(96)))),
        "later": request_of(
            "later", prompt, processors=Processors(allowed_ids=frozenset({7, 8}), no_repeat_ngram_size=1)
        ),
        "stop": request_of(
            "stop",
            prompt,
            stopping=Stopping(9, 2, frozenset({7})),
            processors=Processors(allowed_ids=frozenset({7})),
        ),
    }
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature, 0, 0.9, 3)
        plain = [request_of("plain", prompt, sampling=sampling), request_of("logprobs", prompt, num_top_logprobs=2)]
        expected = ride(model, [replace(request, token_ids=[*prompt]) for request in plain]).tokens
        excluded = [
            replace(request, token_ids=[*prompt], sampling=sampling, num_top_logprobs=1)
            for request in excluding.values()
        ]

        found = ride(model, [*excluded, *plain])

        ends = {name: (event.reason, event.error) for name, event in found.ends.items() if name in excluding}
        assert ends == dict.fromkeys(excluding, (FinishReason.ERROR, NOTHING_ALLOWED))
        assert {name: len(found.tokens[name][0]) for name in excluding} == {"at once": 0, "later": 2, "stop": 0}
        for name in excluding:
            assert len(found.ends[name].sequence.logprobs) == len(found.tokens[name][0])
        assert {name: found.tokens[name] for name in expected} == expected


def test_logits_without_a_number_are_not_taken_for_an_exclusion(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = TransformersForward.logits if isinstance(model.forward, TransformersForward) else NativeForward.logits
    monkeypatch.setattr(type(model.forward), "logits", lambda *step: torch.full_like(logits(*step), float("nan")))
    # Logits that are sampled from are stored; test_native_greedy has those of greedy rows.
    found = ride(
        model, [request_of("r", [5, 9], sampling=Sampling(1.0, 0, 1.0, 3), processors=Processors(bad_words=((3,),)))]
    )
    assert (found.ends["r"].reason, found.ends["r"].error) == (FinishReason.ERROR, INVALID_LOGITS)
