"""Submits with a constraint, as a router sends them: compiled beside the engine, refused or ended with a reason."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any, cast

import pytest

from inflight.common.grammar import GrammarError
from inflight.executor.logits.grammar import CompiledGrammar, GrammarCompiler
from inflight.executor.scheduler.sequence import Constraint
from inflight.executor.serving import service
from inflight.v1 import executor_pb2, stats_pb2, types_pb2
from tests.integration.test_requests import expected_ids
from tests.support.stack.cluster import ExecutorShape, RunningExecutor, start_executor
from tests.support.stack.router_stream import RouterStream, make_submit, router_stream

GRAMMAR = '{"grammars": []}'


class HeldCompiler:
    """Compiles when the test says so. The fake device ignores grammars."""

    def __init__(self) -> None:
        self.compiling: dict[bytes, Future[CompiledGrammar]] = {}
        self.known: dict[bytes, CompiledGrammar] = {}

    def find(self, key: bytes) -> CompiledGrammar | None:
        return self.known.get(key)

    def compile(self, constraint: Constraint) -> Future[CompiledGrammar]:
        return self.compiling.setdefault(constraint.key, Future())

    def close(self) -> None:
        """See `GrammarCompiler`."""

    def end(self, grammar: str = GRAMMAR, error: Exception | None = None) -> None:
        """Ends the compilation of a grammar."""
        future = self.compiling.pop(hashlib.sha256(grammar.encode()).digest())
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast("CompiledGrammar", object()))


@pytest.fixture
def compiler() -> HeldCompiler:
    return HeldCompiler()


@pytest.fixture
async def executor(compiler: HeldCompiler) -> AsyncIterator[RunningExecutor]:
    grammars = cast("GrammarCompiler", cast("Any", compiler))
    running = await start_executor("executor", "model", ExecutorShape(num_standby_sequences=4), grammars=grammars)
    yield running
    await running.service.close(0)
    await running.stop()


def constrained(request_id: str, prompt: list[int], length: int = 5, grammar: str = GRAMMAR) -> executor_pb2.Submit:
    submit = make_submit(request_id, prompt, length)
    submit.constraint.grammar = grammar
    submit.constraint.hash = hashlib.sha256(grammar.encode()).digest()
    return submit


async def end_of(router: RouterStream, request_id: str) -> executor_pb2.SequenceFinished:
    await router.until(lambda: router.of(request_id) and router.of(request_id)[-1].end)
    end = router.of(request_id)[-1].end
    assert end is not None
    return end


async def accepted(router: RouterStream, compiler: HeldCompiler, submit: executor_pb2.Submit) -> None:
    router.send(submits=[submit])
    await router.until(lambda: router.of(submit.request_id))
    assert compiler.compiling


async def test_others_run_while_a_grammar_is_compiled(executor: RunningExecutor, compiler: HeldCompiler) -> None:
    async with router_stream(executor.address) as router:
        await accepted(router, compiler, constrained("waits", [1]))
        router.send(submits=[make_submit("passes", [2], 5)])
        assert (await end_of(router, "passes")).reason == types_pb2.FINISH_REASON_LENGTH
        held = [one for report in router.reports for one in report.held if one.request_id == "waits"]
        assert {one.phase for one in held} <= {
            stats_pb2.SEQUENCE_PHASE_STANDBY,
            stats_pb2.SEQUENCE_PHASE_PREPARING,
        }
        assert not router.of("waits")[0].is_started
        assert not executor.service.has_work, "the watchdog must not count the wait as a stall"

        compiler.end()
        end = await end_of(router, "waits")
        assert router.of("waits")[0].token_ids == expected_ids([1], 5)
        # No mask was ever computed here, so nothing says that the grammar was satisfied.
        assert (end.reason, end.constraint_unfinished) == (types_pb2.FINISH_REASON_LENGTH, True)
        router.attach("waits", 1, 0)
        await router.until(lambda: router.attached)
        assert router.attached[0].submit.constraint.grammar == GRAMMAR
        assert (await end_of(router, "waits")).constraint_unfinished


async def test_known_grammar_boards_at_once(executor: RunningExecutor, compiler: HeldCompiler) -> None:
    submit = constrained("a", [1])
    compiler.known[submit.constraint.hash] = cast("CompiledGrammar", object())
    async with router_stream(executor.address) as router:
        router.send(submits=[submit])
        await end_of(router, "a")
        assert not compiler.compiling


async def test_grammar_that_does_not_compile_ends_its_sequences_only(
    executor: RunningExecutor, compiler: HeldCompiler
) -> None:
    async with router_stream(executor.address) as router:
        await accepted(router, compiler, constrained("a", [1]))
        await accepted(router, compiler, constrained("b", [2], grammar="{}"))
        compiler.end("{}", GrammarError("no grammar here"))
        end = await end_of(router, "b")
        assert (end.reason, end.error) == (types_pb2.FINISH_REASON_ERROR, "no grammar here")
        compiler.end()
        assert (await end_of(router, "a")).reason == types_pb2.FINISH_REASON_LENGTH


async def test_crash_of_the_compiler_is_an_error_without_details(
    executor: RunningExecutor, compiler: HeldCompiler
) -> None:
    async with router_stream(executor.address) as router:
        await accepted(router, compiler, constrained("a", [1]))
        compiler.end(error=RuntimeError("a secret"))
        end = await end_of(router, "a")
        assert (end.reason, end.error) == (
            types_pb2.FINISH_REASON_ERROR,
            "the grammar of the constraint cannot be compiled",
        )


async def test_compilation_is_bounded_in_time(
    executor: RunningExecutor, compiler: HeldCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "COMPILE_TIMEOUT_S", 0.01)
    async with router_stream(executor.address) as router:
        await accepted(router, compiler, constrained("a", [1]))
        end = await end_of(router, "a")
        assert end.reason == types_pb2.FINISH_REASON_ERROR
        assert "was not compiled within" in end.error


async def test_cancel_and_deadline_end_a_sequence_that_waits(executor: RunningExecutor, compiler: HeldCompiler) -> None:
    late = constrained("late", [1])
    late.deadline_ms = 30
    async with router_stream(executor.address) as router:
        await accepted(router, compiler, late)
        await accepted(router, compiler, constrained("cancelled", [2]))
        router.send(cancels=[executor_pb2.CancelSequence(request_id="cancelled", attempt=1)])
        assert (await end_of(router, "cancelled")).reason == types_pb2.FINISH_REASON_CANCELLED
        assert (await end_of(router, "late")).reason == types_pb2.FINISH_REASON_DEADLINE
        compiler.end()
        router.send(submits=[make_submit("next", [3], 2)])
        assert (await end_of(router, "next")).reason == types_pb2.FINISH_REASON_LENGTH
        assert executor.scheduler.is_idle


async def test_drain_hands_back_what_waits_for_its_grammar(executor: RunningExecutor, compiler: HeldCompiler) -> None:
    async with router_stream(executor.address) as router:
        await accepted(router, compiler, constrained("a", [1]))
        drained = asyncio.create_task(executor.service.drain(60))
        assert (await end_of(router, "a")).reason == types_pb2.FINISH_REASON_PREEMPTED
        await drained
        assert executor.service.num_held == 0


async def test_executor_without_a_compiler_and_wrong_hashes_are_refused() -> None:
    running = await start_executor("executor", "model", ExecutorShape())
    wrong = constrained("wrong", [1])
    wrong.constraint.hash = b"no"
    async with router_stream(running.address) as router:
        router.send(submits=[constrained("a", [1]), wrong])
        await router.until(lambda: len(router.rejected) == 2)
        assert {one.request_id: one.reason for one in router.rejected} == {
            "a": executor_pb2.REJECT_REASON_UNSUPPORTED,
            "wrong": executor_pb2.REJECT_REASON_INVALID,
        }
    await running.stop()
