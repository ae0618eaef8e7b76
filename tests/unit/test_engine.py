"""The loop between inbox and device: order, overlap, ends, idleness."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch

from inflight.executor.engine.engine import MAX_FAILURES, Engine
from inflight.executor.engine.gc import GarbageCollection
from inflight.executor.engine.output import EngineOutput, EngineStatus
from inflight.executor.engine.runner import DeviceLostError, PendingStep
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import (
    NO_LOGPROBS,
    FinishEvent,
    FinishReason,
    Sequence,
    StepOutcome,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from tests.support.device.fake_device import FakeDevice, solo_output
from tests.support.scheduler.scheduling import BLOCK_SIZE, LIMITS, make_sequence

TIMEOUT_S = 60


@dataclass(slots=True)
class WatchedStep:
    """A step that can be kept from ending, and that can fail."""

    began_s: float
    ended_s: float
    sampled_ids: tuple[int | None, ...]
    gate: threading.Event
    error: Exception | None = None
    allows_next: bool = True
    copied_s: float = 0.0

    def result(self) -> tuple[int | None, ...]:
        assert self.gate.wait(TIMEOUT_S)
        if self.error is not None:
            raise self.error
        return self.sampled_ids

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """Returns None: no test asks for them here."""
        return NO_LOGPROBS


class WatchedDevice:
    """The fake device; a step takes a second of its own clock, and waits while the gate is shut."""

    def __init__(self, pool: BlockPool) -> None:
        self._device = FakeDevice(pool)
        self.gate = threading.Event()
        self.gate.set()
        self.launched: queue.SimpleQueue[StepPlan] = queue.SimpleQueue()
        self.failing: dict[int, Exception] = {}
        self.failing_launches: dict[int, Exception] = {}
        # What steps return in place of their tokens.
        self.returning: dict[int, tuple[int | None, ...]] = {}
        # Steps that must be read before the next one is planned.
        self.blocking: set[int] = set()
        self.num_launched = 0

    def launch(self, plan: StepPlan) -> PendingStep:
        error = self.failing.get(self.num_launched)
        began_s = float(self.num_launched)
        self.num_launched += 1
        if error is not None or began_s in self.failing_launches:
            self._device.corrupt(plan)
        if began_s in self.failing_launches:
            self.launched.put(plan)
            raise self.failing_launches[int(began_s)]
        sampled_ids: tuple[int | None, ...] = () if error is not None else self._device.run(plan)
        sampled_ids = self.returning.get(int(began_s), sampled_ids)
        self.launched.put(plan)
        return WatchedStep(began_s, began_s + 1, sampled_ids, self.gate, error, began_s not in self.blocking)

    def close(self) -> None:
        """See `StepRunner`."""


@dataclass(slots=True)
class Loop:
    """An engine that runs, and what it published."""

    engine: Engine
    device: WatchedDevice
    scheduler: Scheduler
    outputs: queue.SimpleQueue[EngineOutput]
    deaths: list[BaseException] = field(default_factory=list)
    status: EngineStatus | None = None

    def take(self) -> EngineOutput:
        """The next that it publishes."""
        output = self.outputs.get(timeout=TIMEOUT_S)
        self.status = output.status or self.status
        return output

    def run_until_ended(self, num_ends: int) -> dict[str, tuple[list[int], FinishReason]]:
        """Output and reason of so many ends."""
        ends: dict[str, tuple[list[int], FinishReason]] = {}
        received: dict[Sequence, list[int]] = {}
        while len(ends) < num_ends:
            output = self.take()
            for sequence, offset, token_id in output.tokens:
                assert offset == len(received.setdefault(sequence, []))
                received[sequence].append(token_id)
            for event in output.finished:
                ends[event.sequence.request_id] = (received.get(event.sequence, []), event.reason)
        return ends

    def status_when_idle(self) -> EngineStatus:
        """The newest status, once the engine has nothing to do."""
        while self.status is None or self.status.used_blocks:
            self.take()
        return self.status


@pytest.fixture(params=[True, False], ids=["overlap", "in-turn"])
def loop(request: pytest.FixtureRequest) -> Iterator[Loop]:
    overlap: bool = request.param
    pool = BlockPool(64, BLOCK_SIZE)
    limits = replace(LIMITS, max_num_sequences=4, num_standby_sequences=4)
    outputs: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
    deaths: list[BaseException] = []
    scheduler, device = Scheduler(limits, pool), WatchedDevice(pool)
    engine = Engine(
        scheduler,
        device,
        outputs.put,
        deaths.append,
        overlap=overlap,
        garbage_collection=GarbageCollection(),
        clock=lambda: float(device.num_launched),
    )
    engine.start()
    yield Loop(engine, device, scheduler, outputs, deaths)
    device.gate.set()
    engine.stop()


def sequences(num: int) -> list[Sequence]:
    """Sequences of all lengths; the fake device samples ids 0 to 4, and 3 stops every other."""
    made = [make_sequence(f"r{i}", range(1 + 3 * i), max_tokens=2 + i) for i in range(num)]
    for sequence in made[::2]:
        sequence.stopping = replace(sequence.stopping, stop_token_ids=frozenset({3}))
    return made


def test_everyone_gets_the_output_of_a_run_alone(loop: Loop) -> None:
    expected = {s.request_id: solo_output(s, LIMITS.context_length) for s in sequences(7)}

    for sequence in sequences(7):
        loop.engine.submit(sequence)

    assert loop.run_until_ended(7) == expected


def test_device_gets_its_next_step_before_the_last_is_read_only_with_overlap(loop: Loop) -> None:
    loop.device.gate.clear()
    loop.engine.submit(make_sequence("a", [1], max_tokens=3))
    loop.device.launched.get(timeout=TIMEOUT_S)

    if loop.engine.overlaps:
        assert loop.device.launched.get(timeout=TIMEOUT_S).carries == [True]
    else:
        with pytest.raises(queue.Empty):
            loop.device.launched.get(timeout=0.05)
    loop.device.gate.set()
    assert len(loop.run_until_ended(1)["a"][0]) == 3


def test_step_that_does_not_allow_the_next_one_is_read_first(loop: Loop) -> None:
    loop.device.blocking.add(1)
    loop.engine.submit(make_sequence("a", [1], max_tokens=4))

    assert len(loop.run_until_ended(1)["a"][0]) == 4

    carries = [loop.device.launched.get_nowait().carries[0] for _ in range(4)]
    assert carries == [False, loop.engine.overlaps, False, loop.engine.overlaps]


def test_cancelled_in_flight_ends_without_a_token(loop: Loop) -> None:
    loop.device.gate.clear()
    loop.engine.submit(make_sequence("a", [1], max_tokens=60))
    loop.device.launched.get(timeout=TIMEOUT_S)
    loop.engine.cancel("a", 1)
    loop.device.gate.set()

    _, reason = loop.run_until_ended(1)["a"]
    assert reason is FinishReason.CANCELLED
    assert loop.status_when_idle().num_running == 0


FAILURES = [
    RuntimeError("the device is gone"),
    torch.OutOfMemoryError("the device is full"),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    MemoryError(),
    ValueError("a bug of the runner"),
]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_failed_step_ends_only_who_was_in_it_and_the_loop_goes_on(loop: Loop, error: Exception) -> None:
    loop.device.failing[1] = error
    loop.device.gate.clear()
    loop.engine.submit(make_sequence("a", [1], max_tokens=60))
    for _ in range(2 if loop.engine.overlaps else 1):
        loop.device.launched.get(timeout=TIMEOUT_S)
    loop.device.gate.set()

    assert loop.run_until_ended(1)["a"][1] is FinishReason.ERROR
    assert_goes_on(loop)


@pytest.mark.parametrize(
    ("num_steps_before", "error"),
    [(0, FAILURES[0]), *((1, error) for error in FAILURES), (5, FAILURES[-1])],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_step_that_cannot_be_launched_ends_only_who_was_in_it(
    loop: Loop, num_steps_before: int, error: Exception
) -> None:
    loop.device.failing_launches[num_steps_before] = error
    loop.engine.submit(make_sequence("a", [1], max_tokens=60))

    tokens, reason = loop.run_until_ended(1)["a"]
    assert reason is FinishReason.ERROR
    # What was launched before it counts.
    assert tokens == solo_output(make_sequence("a", [1], max_tokens=60), LIMITS.context_length)[0][:num_steps_before]
    assert_goes_on(loop)


def test_step_that_returns_tokens_for_other_rows_than_it_has_ends_only_who_was_in_it(loop: Loop) -> None:
    loop.device.returning[2] = (1, 1)
    loop.engine.submit(make_sequence("a", [1], max_tokens=60))
    tokens, reason = loop.run_until_ended(1)["a"]
    assert (len(tokens), reason) == (2, FinishReason.ERROR)
    assert_goes_on(loop)


def test_sequence_whose_logits_hold_no_number_ends_and_is_counted_and_the_first_is_logged(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "c"):
        step = loop.device.num_launched + 2
        loop.device.returning[step] = (None,)
        loop.engine.submit(make_sequence(name, [1], max_tokens=60))
        tokens, reason = loop.run_until_ended(1)[name]
        assert (len(tokens), reason) == (2, FinishReason.ERROR)
        assert loop.status_when_idle().num_invalid_logits == (1 if name == "a" else 2)
    assert [record.message for record in caplog.records] == [
        "a ended with an error (logged once per kind): the model returned no usable logits (NaN or -inf only)"
    ]
    assert_goes_on(loop)


def assert_goes_on(loop: Loop) -> None:
    """The engine takes the next sequence, has every block for it, and computes it as if nothing had been."""
    later = make_sequence("b", [1, 2], max_tokens=5)
    expected = solo_output(make_sequence("b", [1, 2], max_tokens=5), LIMITS.context_length)
    loop.engine.submit(later)
    assert loop.run_until_ended(1)["b"] == expected
    assert loop.status_when_idle().used_blocks == 0
    assert not loop.deaths


def test_device_on_which_nothing_succeeds_any_more_ends_the_engine(loop: Loop) -> None:
    loop.device.failing_launches = dict.fromkeys(range(MAX_FAILURES), RuntimeError("its context is gone"))
    for i in range(MAX_FAILURES):
        loop.engine.submit(make_sequence(f"r{i}", [1]))
        loop.device.launched.get(timeout=TIMEOUT_S)
    loop.engine.stop()

    assert [type(death) for death in loop.deaths] == [DeviceLostError]


LOST = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`"),
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
]


@pytest.mark.parametrize("error", LOST, ids=lambda error: str(error).partition("\n")[0])
@pytest.mark.parametrize("fails_at_launch", [False, True])
def test_error_after_which_a_gpu_computes_no_more_ends_the_engine_and_no_sequence(
    loop: Loop, error: Exception, fails_at_launch: bool
) -> None:
    (loop.device.failing_launches if fails_at_launch else loop.device.failing)[1] = error
    loop.engine.submit(make_sequence("a", [1], max_tokens=60))
    for _ in range(2):
        loop.device.launched.get(timeout=TIMEOUT_S)
    loop.engine.stop()

    assert [(type(death), str(death)) for death in loop.deaths] == [(DeviceLostError, str(error).partition("\n")[0])]
    assert not ends_in(loop.outputs)


@pytest.mark.parametrize("answer", [None, *LOST[:1], torch.AcceleratorError("CUDA error: out of memory")], ids=str)
def test_error_of_a_library_ends_the_engine_only_if_the_gpu_answers_no_more(
    loop: Loop, answer: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an error of cuBLAS, and a GPU that answers, has lost its context, or lacks memory
    def synchronize() -> None:
        if answer is not None:
            raise answer

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    loop.device.failing_launches[1] = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED")
    loop.engine.submit(make_sequence("a", [1], max_tokens=60))
    for _ in range(2):
        loop.device.launched.get(timeout=TIMEOUT_S)
    loop.engine.stop()

    # Then its sequences go on elsewhere, or they alone end with the error
    is_lost = answer is LOST[0]
    assert [type(death) for death in loop.deaths] == ([DeviceLostError] if is_lost else [])
    ended = [event.sequence.request_id for event in ends_in(loop.outputs)]
    assert ended == ([] if is_lost else ["a"])


def test_stop_waits_for_the_steps_in_flight_and_gives_no_end(loop: Loop) -> None:
    loop.device.gate.clear()
    loop.engine.submit(make_sequence("a", [1], max_tokens=60))
    loop.device.launched.get(timeout=TIMEOUT_S)
    stopping = threading.Thread(target=loop.engine.stop)
    stopping.start()
    loop.device.gate.set()
    stopping.join(TIMEOUT_S)

    assert not stopping.is_alive()
    assert not ends_in(loop.outputs)
    assert not loop.deaths


def ends_in(outputs: queue.SimpleQueue[EngineOutput]) -> list[FinishEvent]:
    """The ends that were published and not taken."""
    finished: list[FinishEvent] = []
    while not outputs.empty():
        finished += outputs.get().finished
    return finished


def test_drain_lets_the_held_end_and_refuses_the_next(loop: Loop) -> None:
    loop.device.gate.clear()
    loop.engine.submit(make_sequence("a", [1], max_tokens=4))
    loop.device.launched.get(timeout=TIMEOUT_S)
    loop.engine.drain()
    loop.engine.submit(make_sequence("b", [1]))
    loop.device.gate.set()

    assert list(loop.run_until_ended(1)) == ["a"]
    assert loop.status_when_idle().draining
    assert loop.scheduler.num_held == 0


def test_bug_of_ours_kills_the_engine_and_is_told(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def update(result: StepResult) -> StepOutcome:
        raise AssertionError("two sequences in one block")

    monkeypatch.setattr(loop.scheduler, "update", update)
    loop.engine.submit(make_sequence("a", [1]))
    loop.device.launched.get(timeout=TIMEOUT_S)
    loop.engine.stop()

    assert [type(death) for death in loop.deaths] == [AssertionError]


def test_stop_says_whether_the_step_in_flight_has_ended(loop: Loop) -> None:
    loop.device.gate.clear()
    loop.engine.submit(make_sequence("a", [1], max_tokens=60))
    loop.device.launched.get(timeout=TIMEOUT_S)

    assert not loop.engine.stop(timeout_s=0)
    loop.device.gate.set()
    assert loop.engine.stop(timeout_s=TIMEOUT_S)


def test_idle_engine_launches_nothing_and_waits(loop: Loop) -> None:
    loop.engine.submit(make_sequence("a", [1], max_tokens=2))
    loop.run_until_ended(1)
    num_launched = loop.device.num_launched

    loop.engine.cancel("unknown", 1)
    loop.engine.submit(make_sequence("b", [1], max_tokens=1))
    loop.run_until_ended(1)

    # One step for "b", and none for anything else.
    assert loop.device.num_launched == num_launched + 1


def test_held_is_made_again_only_when_a_sequence_comes_or_goes(loop: Loop) -> None:
    loop.engine.submit(make_sequence("a", [1], max_tokens=30))
    statuses: list[EngineStatus] = []
    while not statuses or statuses[-1].held:
        output = loop.take()
        if output.status is not None and (output.status.held or statuses):
            statuses.append(output.status)
    assert len({id(status.held) for status in statuses}) == 2
    assert [held.request_id for held in statuses[0].held] == ["a"]


def test_device_that_is_always_busy_exposes_no_host_time(loop: Loop) -> None:
    loop.engine.submit(make_sequence("a", [1], max_tokens=10))
    loop.run_until_ended(1)
    loop.engine.submit(make_sequence("b", [1], max_tokens=10))
    loop.run_until_ended(1)
    status = loop.status_when_idle()

    # Each step began when the one before had ended, and took a second.
    assert status.exposed_host_ms == 0
    assert status.device_busy_fraction == 1
    assert status.device_busy_s == status.elapsed_s >= 10
