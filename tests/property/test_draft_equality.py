"""Tokens do not depend on drafts: with right, wrong, random and looked-up ones each request gets what it gets without
any."""

from __future__ import annotations

import queue
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from transformers import AutoModelForCausalLM, LlamaConfig

from inflight.common.model_source import resolve_model
from inflight.executor.engine.engine import Engine
from inflight.executor.engine.output import EngineOutput
from inflight.executor.engine.runner import PendingStep
from inflight.executor.forward.native import NativeForward
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.drafting import Drafting
from inflight.executor.scheduler.limits import Overcommit
from inflight.executor.scheduler.scheduler import Scheduler, SchedulerLimits, SchedulerPolicy
from inflight.executor.scheduler.sequence import (
    Constraint,
    FinishReason,
    Processors,
    Sampling,
    StepPlan,
    StepResult,
    Stopping,
    TokenLogprobs,
)
from inflight.executor.scheduler.sequence import Sequence as Request
from inflight.executor.speculation.budget import DraftBudget
from inflight.executor.speculation.counts import DraftCounts
from inflight.executor.speculation.proposer import NgramProposer, Proposer
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.device.torch_threads import torch_threads
from tests.support.examples import examples
from tests.support.scheduler.drafting import CHEAP, EagerBudget, GuessingProposer, eager
from tests.support.scheduler.scheduling import make_limits
from tests.support.text.small_vocabulary import (
    EOS_ID,
    OTHER_EOS_ID,
    VOCABULARY_SIZE,
    constraint,
    regex_grammar,
    schema_grammar,
)

BLOCK_SIZE = 16
CONTEXT_LENGTH = 128
MOST_REQUESTS = 4
LIMITS = make_limits(
    max_num_sequences=MOST_REQUESTS,
    num_standby_sequences=MOST_REQUESTS,
    max_num_tokens=64,
    context_length=CONTEXT_LENGTH,
)
# Four sequences of up to five blocks each in eight.
PREEMPTING = replace(
    LIMITS,
    policy=SchedulerPolicy.MAX_UTILIZATION,
    overcommit=Overcommit(watermark=0.0, margin=0.0, max_steps_away=10**6),
    num_host_blocks=4,
)
NUM_BLOCKS = {SchedulerPolicy.GUARANTEED_NO_EVICT: 32, SchedulerPolicy.MAX_UTILIZATION: 8}
MODES = {
    "batch": LIMITS,
    "few-tokens": replace(LIMITS, max_num_tokens=MOST_REQUESTS + 3),
    "preempting": PREEMPTING,
}
GREEDY = Sampling(0.0, 0, 1.0, 0)
DRAFTERS = ("right", "wrong", "random", "ngram")


@dataclass(frozen=True)
class Answer:
    """What a request got."""

    ids: list[int]
    reason: FinishReason
    stop_token_id: int | None
    logprobs: dict[int, TokenLogprobs]
    error: str
    is_unfinished: bool


@dataclass(frozen=True)
class Run:
    """The answers to some requests, and what happened meanwhile."""

    answers: dict[str, Answer]
    counts: DraftCounts
    num_preemptions: int


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(LlamaConfig(**sizes(vocab_size=VOCABULARY_SIZE)), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module", params=["cpu", "reference"])
def model(request: pytest.FixtureRequest, folder: Path) -> Iterator[PagedModel]:
    with torch_threads(1), pytest.MonkeyPatch.context() as patch:
        if request.param == "reference":
            patch.setattr("inflight.executor.model.loader._native_sampler", lambda *_: None)
        loaded = load_model(
            resolve_model(str(folder)), dtype_name="float32", device_name="cpu", backend_name=request.param
        )
        loaded.allocate_kv(max(NUM_BLOCKS.values()), BLOCK_SIZE)
        yield loaded


def run(
    model: PagedModel,
    requests: Sequence[Request],
    limits: SchedulerLimits,
    overlap: bool,
    drafting: Drafting | None,
    most_steps: int | None = None,
) -> Run:
    """Runs requests that arrive at once; to their ends, or until the executor is lost after `most_steps`."""
    pool = BlockPool(NUM_BLOCKS[limits.policy], BLOCK_SIZE)
    scheduler, runner = Scheduler(limits, pool, drafting), ModelRunner(model, limits, BLOCK_SIZE)
    for request in requests:
        assert scheduler.offer(request) is None
    launched: deque[tuple[StepPlan, PendingStep]] = deque()
    answers: dict[str, Answer] = {}
    num_steps = 0
    while (launched or not scheduler.is_idle) and num_steps != most_steps:
        num_steps += 1
        plan = scheduler.schedule(terms=CHEAP)
        if plan.rows:
            launched.append((plan, runner.launch(plan)))
        while len(launched) > int(overlap and bool(plan.rows)):
            done, pending = launched.popleft()
            for event in scheduler.update(StepResult(done, pending.result(), pending.logprobs())).finished:
                sequence = event.sequence
                ids = sequence.token_ids[sequence.num_prompt_tokens :]
                answers[sequence.request_id] = Answer(
                    ids,
                    event.reason,
                    event.stop_token_id,
                    sequence.logprobs,
                    event.error,
                    event.constraint_unfinished,
                )
    runner.close()
    if most_steps is None:
        scheduler.check_when_idle()
        assert pool.num_used == 0
    return Run(answers, scheduler.draft_counts, scheduler.num_preemptions)


IDS = st.integers(4, VOCABULARY_SIZE - 1)
ENDS = frozenset({EOS_ID, OTHER_EOS_ID})
GRAMMARS = (
    schema_grammar(
        {
            "type": "object",
            "properties": {"abc": {"enum": ["ab", "ba", None]}, "number": {"type": "integer", "minimum": 3}},
            "required": ["abc", "number"],
            "additionalProperties": False,
        }
    ),
    regex_grammar(r"(ab|ba)*c|[0-9]{2,4}é?"),
    LLMatcher.grammar_from_lark('start: "a" some "true" some\nsome[max_tokens=5]: /[a-f]+/\n'),
)
PROCESSORS = st.builds(
    Processors,
    bias=st.just(()) | st.dictionaries(IDS, st.floats(-5, 5, width=32), max_size=6).map(lambda one: tuple(one.items())),
    allowed_ids=st.just(frozenset()) | st.frozensets(IDS, min_size=20, max_size=60),
    repetition_penalty=st.sampled_from((1.0, 1.0, 0.7, 1.3)),
    frequency_penalty=st.sampled_from((0.0, 0.0, -0.5, 1.5)),
    presence_penalty=st.sampled_from((0.0, 0.0, -0.5, 1.5)),
    bad_words=st.just(()) | st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    no_repeat_ngram_size=st.sampled_from((0, 0, 2, 3)),
)
# Greedy rows and rows without changes often, because they take other ways through the code.
SAMPLING = st.just(Sampling(0.0, 0, 1.0, 0)) | st.builds(
    Sampling,
    temperature=st.sampled_from((0.0, 0.3, 1.0)),
    top_k=st.sampled_from((0, 0, 1, 20)),
    top_p=st.sampled_from((1.0, 0.9, 0.3)),
    seed=st.integers(0, 2**64 - 1),
    min_p=st.sampled_from((0.0, 0.0, 0.2)),
)


@st.composite
def request_strategy(draw: st.DrawFn, number: int) -> Request:
    # The first token tells the requests apart, the rest repeats itself, so that n-grams are found.
    prompt = [4 + number, *draw(st.lists(IDS, min_size=1, max_size=8)) * draw(st.integers(1, 3))]
    most = draw(st.integers(1, 40))
    stops = frozenset(draw(st.just([]) | st.lists(IDS, min_size=1, max_size=6)))
    grammar = draw(st.sampled_from((None, None, *GRAMMARS)))
    return Request(
        request_id=f"r{number}",
        attempt=1,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=draw(SAMPLING),
        stopping=Stopping(most, draw(st.integers(0, 6)), stops if grammar is None else stops | ENDS),
        num_reserved_blocks=-(-(len(prompt) + most) // BLOCK_SIZE),
        cache_salt=draw(st.sampled_from((None, b"", b""))),
        num_top_logprobs=draw(st.sampled_from((None, None, 0, 3))),
        processors=draw(st.just(Processors()) | PROCESSORS),
        constraint=None if grammar is None else constraint(grammar, ignores_eos=draw(st.booleans())),
        max_drafts=draw(st.integers(0, 7)),
    )


def again(requests: Sequence[Request], limits: SchedulerLimits, *, has_output: bool = False) -> list[Request]:
    """The requests before they ran, with a reservation that the policy would make; or as another executor gets them
    after the loss of one."""
    return [
        Request(
            one.request_id,
            1,
            one.token_ids[: None if has_output else one.num_prompt_tokens],
            one.num_prompt_tokens,
            one.sampling,
            one.stopping,
            -(-(len(one.token_ids) + 1) // BLOCK_SIZE) if limits.is_overcommitted else one.num_reserved_blocks,
            one.cache_salt,
            num_top_logprobs=one.num_top_logprobs,
            logprobs=dict(one.logprobs) if has_output else {},
            processors=one.processors,
            constraint=None if one.constraint is None else fresh(one.constraint),
            max_drafts=one.max_drafts,
        )
        for one in requests
    ]


def fresh(used: Constraint) -> Constraint:
    return constraint(used.grammar, ignores_eos=used.ignores_eos)


def proposers(drafter: str, texts: dict[int, list[int]], seed: int) -> Callable[[], Proposer]:
    """Returns what makes proposers that know the texts of the run without drafts, by their first token."""
    some = random.Random(seed)

    def right(ids: Sequence[int]) -> int:
        text = texts[ids[0]]
        return text[len(ids)] if len(ids) < len(text) else 0

    guesses: dict[str, Callable[[Sequence[int]], int]] = {
        "right": right,
        "wrong": lambda ids: (right(ids) + 1) % VOCABULARY_SIZE,
        "random": lambda ids: right(ids) if some.random() < 0.7 else some.randrange(VOCABULARY_SIZE),
    }
    if drafter == "ngram":
        return NgramProposer
    return lambda: GuessingProposer(guesses[drafter])


def tokens_of(answers: dict[str, Answer]) -> dict[str, Answer]:
    return {name: replace(answer, logprobs={}) for name, answer in answers.items()}


def assert_same_logprobs(found: Answer, expected: Answer, is_exact: bool) -> None:
    """The products of torch round differently by the number of their rows."""
    if is_exact:
        assert found.logprobs == expected.logprobs
        return
    assert found.logprobs.keys() == expected.logprobs.keys()
    for offset, one in expected.logprobs.items():
        assert found.logprobs[offset].logprob == pytest.approx(one.logprob, abs=1e-4)


CASES: dict[str, st.SearchStrategy[Any]] = {
    "requests": st.integers(1, MOST_REQUESTS).flatmap(lambda n: st.tuples(*(request_strategy(i) for i in range(n)))),
    "drafter": st.sampled_from(DRAFTERS),
    "mode": st.sampled_from(sorted(MODES)),
    "overlap": st.booleans(),
    "num_ahead": st.sampled_from((0, 1, 8)),
    "checks_grammar": st.booleans(),
    "lost_after": st.just(None) | st.integers(1, 12),
}


@settings(max_examples=examples(25), deadline=None)
@given(**CASES)
def test_tokens_do_not_depend_on_drafts(model: PagedModel, **case: Any) -> None:
    check(model, **case)


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
@given(**CASES)
def test_tokens_of_many_requests_do_not_depend_on_drafts(model: PagedModel, **case: Any) -> None:
    check(model, **case)


def check(
    model: PagedModel,
    requests: tuple[Request, ...],
    drafter: str,
    mode: str,
    overlap: bool,
    num_ahead: int,
    checks_grammar: bool,
    lost_after: int | None,
) -> None:
    """Asserts that the requests get with drafts what they get without, also if another executor goes on with them."""
    expected = run(model, again(requests, LIMITS), LIMITS, False, None).answers
    texts = {one.token_ids[0]: [*one.token_ids, *expected[one.request_id].ids] for one in requests}
    answers: dict[str, Answer] = {}
    running = again(requests, MODES[mode])
    if lost_after is not None:
        drafting = eager(proposers("ngram", texts, seed=1), checks_grammar=checks_grammar)
        answers = run(model, running, MODES[mode], overlap, drafting, lost_after).answers
        left = [request for request in running if request.request_id not in answers]
        running = again(left, MODES[mode], has_output=True)
    drafting = eager(proposers(drafter, texts, seed=len(requests)), num_ahead, checks_grammar=checks_grammar)

    found = run(model, running, MODES[mode], overlap, drafting)
    found.answers.update(answers)

    assert tokens_of(found.answers) == tokens_of(expected)
    for name, answer in expected.items():
        assert_same_logprobs(found.answers[name], answer, is_exact=isinstance(model.forward, NativeForward))
    # A grammar forces what no other proposer drafts.
    if drafter in ("right", "wrong") and (not checks_grammar or all(one.constraint is None for one in requests)):
        # A draft ends where the text does, and what is behind it is not counted.
        num_right = sum(found.counts.accepted)
        assert (
            num_right == 0 if drafter == "wrong" else num_right <= sum(len(answer.ids) for answer in expected.values())
        )


def test_right_drafts_behind_a_grammar_are_accepted(model: PagedModel) -> None:
    request = Request(
        "r0", 1, [4, 9], 2, GREEDY, Stopping(40, 0, ENDS), 3, b"", constraint=constraint(GRAMMARS[0]), max_drafts=7
    )
    expected = run(model, again([request], LIMITS), LIMITS, False, None).answers
    texts = {4: [4, 9, *expected["r0"].ids]}
    for checks_grammar in (False, True):
        drafting = eager(proposers("right", texts, seed=0), checks_grammar=checks_grammar)
        found = run(model, again([request], LIMITS), LIMITS, True, drafting)
        assert tokens_of(found.answers) == tokens_of(expected)
        # The first token and the one behind each draft are not drafted.
        assert found.counts.num_accepted >= len(expected["r0"].ids) // 2
    assert found.counts.num_accepted == found.counts.num_verified


def ride(
    model: PagedModel, requests: Sequence[Request], drafting: Drafting
) -> tuple[dict[str, list[int]], DraftCounts]:
    """Returns the output of requests that arrive at once at an engine, and what it drafted."""
    outputs: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
    scheduler = Scheduler(LIMITS, BlockPool(NUM_BLOCKS[LIMITS.policy], BLOCK_SIZE), drafting)
    runner = ModelRunner(model, LIMITS, BLOCK_SIZE)
    engine = Engine(scheduler, runner, outputs.put, lambda error: None)
    for request in requests:
        engine.submit(request)
    engine.start()
    ends: dict[str, list[int]] = {}
    received: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while len(ends) < len(requests):
        output = outputs.get(timeout=60)
        for sequence, offset, token_id in output.tokens:
            assert offset == len(received[sequence.request_id])
            received[sequence.request_id].append(token_id)
        ends |= {one.sequence.request_id: received[one.sequence.request_id] for one in output.finished}
    engine.stop()
    runner.close()
    scheduler.check_when_idle()
    return ends, scheduler.draft_counts


@pytest.mark.parametrize("budget", [EagerBudget, DraftBudget])
def test_greedy_output_equals_prompt_lookup_of_transformers(
    model: PagedModel, folder: Path, budget: Callable[[], DraftBudget]
) -> None:
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    some = random.Random(11)
    prompts = [[3 + i, *[some.randrange(3, VOCABULARY_SIZE) for _ in range(6)] * 3] for i in range(MOST_REQUESTS)]
    # The model is random, so only a reward makes it repeat itself.
    fields: dict[str, Any] = {"processors": Processors(repetition_penalty=0.4), "max_drafts": 7}
    requests = [
        Request(f"r{i}", 1, [*prompt], len(prompt), GREEDY, Stopping(60, 0, frozenset()), 5, b"", **fields)
        for i, prompt in enumerate(prompts)
    ]

    found, counts = ride(model, requests, Drafting(NgramProposer, budget()))

    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": 60, "eos_token_id": None, "repetition_penalty": 0.4}
        theirs = network.generate(ids, attention_mask=torch.ones_like(ids), prompt_lookup_num_tokens=7, **options)
        assert found[f"r{i}"] == theirs[0, len(prompt) :].tolist()
    if budget is EagerBudget:
        assert counts.num_accepted > 20
