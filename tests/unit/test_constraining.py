"""Constraints of requests on their way to executors: compiling processes, what they cost, and what becomes of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from typing import Any, cast

import pytest

from inflight.common.errors import Reason, RequestError
from inflight.common.grammar import grammar_hash
from inflight.common.protocol import PROTOCOL_VERSION
from inflight.router.api import constraining
from inflight.router.api.constraining import NOT_TRIED, Constraining
from inflight.router.constraint.answer_grammar import AnswerRules, ToolSchema
from inflight.router.constraint.process import TOO_LARGE, TOO_LONG, CompilerTimeoutError, CompilingProcess
from inflight.router.constraint.source import TOOLS, ConstraintError, ConstraintSource
from inflight.router.tools.formats import FORMATS, AnswerFormat, ToolFormat
from inflight.v1 import executor_pb2, inference_pb2, types_pb2
from tests.support.ledger.scripted_store import CallContext, ScriptedRouter, accepts, placement, settled, steps
from tests.support.stack.cluster import token_request
from tests.support.text.grammars import accepts as accepts_text
from tests.unit.test_tool_parser import written

# Takes seconds of processor time in the compiler.
COSTLY = json.dumps({"type": "integer", "multipleOf": 1_000_003})


def is_too_costly(refusal: str) -> bool:
    """Whether it refuses a constraint that costs too much. The limit that is met first depends on the machine."""
    return TOO_LONG in refusal or TOO_LARGE in refusal


def schema(value: Any) -> ConstraintSource:
    return ConstraintSource("json_schema", (json.dumps(value),))


class CountedProcess(CompilingProcess):
    """A compiling process; counts them and what they are asked."""

    started: list[CountedProcess]
    asked: list[ConstraintSource]

    def __init__(self) -> None:
        super().__init__()
        self.started.append(self)

    def compile(self, source: ConstraintSource, timeout_s: float = 60.0) -> tuple[str, list[str]]:
        self.asked.append(source)
        return super().compile(source, timeout_s)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[CountedProcess]:
    monkeypatch.setattr(CountedProcess, "started", [], raising=False)
    monkeypatch.setattr(CountedProcess, "asked", [], raising=False)
    return CountedProcess.started


async def refusal(constraining: Constraining, source: ConstraintSource) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await constraining.compiled(source, "t")
    return caught.value


async def test_processes_start_with_the_first_constraint_and_answers_are_remembered(
    processes: list[CountedProcess],
) -> None:
    constraining = Constraining(CountedProcess)
    assert processes == []
    for _ in range(3):
        assert "json_schema" in (await constraining.compiled(ConstraintSource("json_object", ()), "t")).grammar
        error = await refusal(constraining, schema({"not": {}}))
        assert error.reason is Reason.INVALID_FIELD
        assert [violation.field for violation in error.violations] == ["constraint.json_schema"]
        assert "`not`" in str(error)
    assert (len(processes), len(CountedProcess.asked)) == (1, 2)


async def test_process_started_before_the_first_constraint_compiles_it(processes: list[CountedProcess]) -> None:
    constraining = Constraining(CountedProcess)
    await constraining.start_process()
    assert len(processes) == 1
    assert await constraining.compiled(schema({"type": "null"}), "t")
    assert len(processes) == 1


async def test_equal_constraints_that_come_together_are_compiled_once(processes: list[CountedProcess]) -> None:
    constraining, source = Constraining(CountedProcess), schema({"type": "object"})
    compiled = await asyncio.gather(*(constraining.compiled(source, f"t{i}") for i in range(20)))
    assert len({one.grammar for one in compiled}) == 1
    assert len(CountedProcess.asked) == 1


async def test_cancelled_request_leaves_the_result_for_the_next(processes: list[CountedProcess]) -> None:
    constraining, source = Constraining(CountedProcess), schema({"type": "array"})
    first = asyncio.create_task(constraining.compiled(source, "t"))
    await asyncio.sleep(0)
    first.cancel()
    assert await constraining.compiled(source, "t")
    assert first.cancelled()
    assert len(CountedProcess.asked) == 1


async def test_costly_constraint_is_refused_once_and_others_go_on(processes: list[CountedProcess]) -> None:
    source, others_went_on = ConstraintSource("json_schema", (COSTLY,)), threading.Event()

    class HeldProcess(CountedProcess):
        def compile(self, given: ConstraintSource, timeout_s: float = 60.0) -> tuple[str, list[str]]:
            assert given != source or others_went_on.wait(60)
            return super().compile(given, timeout_s)

    constraining = Constraining(HeldProcess)
    costly = asyncio.create_task(refusal(constraining, source))
    assert await constraining.compiled(schema({"type": "null"}), "other tenant")
    assert not costly.done()
    others_went_on.set()
    refused = str(await costly)
    assert is_too_costly(refused)
    assert str(await refusal(constraining, source)) == refused
    assert len(CountedProcess.asked) == 2
    assert await constraining.compiled(schema({"type": "boolean"}), "t")


def tools_of(*tools: ToolSchema, tools_format: ToolFormat = FORMATS[0]) -> ConstraintSource:
    return ConstraintSource(TOOLS, (AnswerRules(AnswerFormat(tools_format), tools, must_call=True).to_json(),))


def parameters(**properties: Any) -> str:
    return json.dumps({"properties": properties, "required": list(properties)})


class EarlyRefusal(CountedProcess):
    """Refuses the costly schema without compiling it for seconds, as the test above has it done."""

    def compile(self, given: ConstraintSource, timeout_s: float = 60.0) -> tuple[str, list[str]]:
        if "multipleOf" in given.to_json():
            raise ConstraintError([TOO_LONG])
        return super().compile(given, timeout_s)


@pytest.mark.usefixtures("processes")
async def test_costly_parameters_of_a_tool_are_any_object_unless_it_is_strict() -> None:
    costly = parameters(x=json.loads(COSTLY))
    constraining = Constraining(EarlyRefusal)
    compiled = await constraining.compiled(tools_of(ToolSchema("f", costly)), "t")
    assert "multipleOf" not in compiled.grammar
    assert is_too_costly(compiled.unenforced["f"])
    refused = await refusal(constraining, tools_of(ToolSchema("f", costly, is_strict=True)))
    assert [violation.field for violation in refused.violations] == ["chat.functions"]
    assert is_too_costly(str(refused))


def pattern(text: str) -> str:
    return parameters(x={"type": "array", "items": {"type": "string", "pattern": text}, "minItems": 1})


SOUND = parameters(n={"type": "integer"})
# Parameters that cannot be enforced, and why.
UNENFORCEABLE = {
    "keyword": (parameters(x={"not": {}}), "the schema has the keyword `not`"),
    "dialect": (pattern("(?=a)b"), "the schema has the pattern"),
    "compiled": (pattern("[z-a]"), "the schema has the pattern"),
    "number": (parameters(x={"const": 2**60}), f'the schema has the number "{2**60}"'),
    "reference": (parameters(x={"$ref": "#/$defs/gone"}), "the schema has `$ref`"),
    "nothing": (parameters(x={"minimum": 5, "maximum": 4, "type": "integer"}), ""),
}


@pytest.mark.parametrize("tools_format", FORMATS, ids=lambda one: one.name)
async def test_tool_whose_parameters_cannot_be_enforced_loses_only_its_own(
    tools_format: ToolFormat, caplog: pytest.LogCaptureFixture
) -> None:
    # Texts of Gemma's notation have no patterns.
    unenforceable = {
        name: one for name, one in UNENFORCEABLE.items() if tools_format.values != "gemma" or name != "compiled"
    }
    bad = [ToolSchema(name, schema) for name, (schema, _) in unenforceable.items()]
    tools = (ToolSchema("good", SOUND), *bad, ToolSchema("strict", SOUND, is_strict=True))
    compiled = await Constraining().compiled(tools_of(*tools, tools_format=tools_format), "t")
    assert list(compiled.unenforced) == list(unenforceable)
    for name, (_, reason) in unenforceable.items():
        assert compiled.unenforced[name].startswith(reason)
        line = f"the parameters of the function {name} of tenant t are not enforced: {reason}"
        assert any(record.getMessage().startswith(line) for record in caplog.records)
    for name in ("good", "strict", *unenforceable):
        assert accepts_text(compiled.grammar, written(tools_format, [(name, '{"n": 1}')]))
        is_any = accepts_text(compiled.grammar, written(tools_format, [(name, '{"n": "x y", "m": "z"}')]))
        assert is_any == (name in unenforceable)


async def test_strict_tool_whose_parameters_cannot_be_enforced_is_refused_beside_others() -> None:
    bad, _ = UNENFORCEABLE["keyword"]
    tools = (ToolSchema("good", SOUND), ToolSchema("loose", bad), ToolSchema("f", bad, is_strict=True))
    refused = str(await refusal(Constraining(), tools_of(*tools)))
    assert "f: parameters" in refused
    assert "loose" not in refused


async def test_parameters_that_cannot_be_enforced_together_are_all_any_object() -> None:
    large = parameters(x={"enum": ["x" * 90 + str(i) for i in range(400)]})
    tools = tuple(ToolSchema(f"f{number}", large) for number in range(40))
    compiled = await Constraining().compiled(tools_of(*tools), "t")
    assert set(compiled.unenforced) == {tool.name for tool in tools}
    assert all("together with those of the other functions" in reason for reason in compiled.unenforced.values())


@pytest.mark.usefixtures("processes")
async def test_number_of_costly_tools_that_are_compiled_alone_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraining, "MAX_COSTLY_FUNCTIONS", 1)
    tools = tuple(ToolSchema(f"f{number}", parameters(x=json.loads(COSTLY))) for number in range(9))
    compiled = await Constraining(EarlyRefusal).compiled(tools_of(*tools, ToolSchema("g", SOUND)), "t")
    assert [reason == NOT_TRIED for reason in compiled.unenforced.values()] == [False] + [True] * 9


async def test_killed_process_is_replaced(processes: list[CountedProcess]) -> None:
    constraining = Constraining(CountedProcess)
    assert await constraining.compiled(schema({"type": "null"}), "t")
    os.kill(processes[0].pid, signal.SIGKILL)
    assert await constraining.compiled(schema({"type": "boolean"}), "t")
    assert len(processes) == 2


def test_process_killed_at_work_says_nothing_about_its_constraint() -> None:
    process = CompilingProcess()
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(CompilerTimeoutError):
        process.compile(schema({"type": "null"}), timeout_s=0.05)
    assert not process.is_alive


def test_constraint_beyond_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    process = CompilingProcess()
    # As after an allocation that failed.
    os.kill(process.pid, signal.SIGABRT)
    with pytest.raises(ConstraintError, match=TOO_LARGE):
        process.compile(schema({"type": "null"}), timeout_s=60)


def test_process_has_none_of_the_routers_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_RESUME_SECRET", "secret")
    process = CompilingProcess()
    process.compile(schema({}), timeout_s=60)
    with open(f"/proc/{process.pid}/environ") as environment:
        assert "INFLIGHT_" not in environment.read()
    process.close()
    assert not process.is_alive


async def constrained(
    end: executor_pb2.ServeResponse, stop: str = "", **fields: Any
) -> tuple[executor_pb2.Submit, list[inference_pb2.StreamEvent]]:
    """Serves a constrained request. Returns what its executor was told and what its client read."""
    router, context = ScriptedRouter("m"), CallContext()
    link, store = router.link("e0", "m"), router.stores["m"]
    assert link.description is not None
    link.description.protocol_version = PROTOCOL_VERSION
    store.answers.append(placement())
    request = token_request([1, 2], 3, model="m", request_id="r", **fields)
    request.stopping.stop.extend([stop] if stop else ())
    async with router.running():
        call = asyncio.create_task(router.service.Generate(request, cast(Any, context)))
        while not link._outbox.submits and not call.done():
            await asyncio.sleep(0.001)
        submit = executor_pb2.Submit()
        submit.CopyFrom(link._outbox.submits[0])
        link.receive(accepts(1))
        link.receive(steps(3, cached=0))
        link.receive(end)
        await call
        await settled()
    return submit, context.events


def ended(reason: types_pb2.FinishReason, *, unfinished: bool) -> executor_pb2.ServeResponse:
    response = steps(4, 5, offset=1, end=reason)
    response.step.finished[0].constraint_unfinished = unfinished
    return response


@pytest.mark.parametrize("unfinished", [False, True])
async def test_grammar_and_hash_go_to_the_executor_and_its_verdict_to_the_client(unfinished: bool) -> None:
    end = ended(types_pb2.FINISH_REASON_LENGTH, unfinished=unfinished)
    submit, events = await constrained(end, constraint={"choice": {"choices": ["yes", "no"]}})
    assert submit.constraint.grammar == '{"grammars":[{"lark_grammar":"start: \\"yes\\" | \\"no\\""}]}'
    assert submit.constraint.hash == grammar_hash(submit.constraint.grammar)
    (finished,) = [event.finished for event in events if event.HasField("finished")]
    assert finished.constraint_unfinished is unfinished


async def test_request_without_a_constraint_has_none_and_is_not_unfinished() -> None:
    submit, events = await constrained(ended(types_pb2.FINISH_REASON_LENGTH, unfinished=False))
    assert not submit.HasField("constraint")
    (finished,) = [event.finished for event in events if event.HasField("finished")]
    assert not finished.constraint_unfinished


async def test_output_that_the_router_ends_counts_as_unfinished() -> None:
    end = ended(types_pb2.FINISH_REASON_LENGTH, unfinished=False)
    _, events = await constrained(end, stop="t4", constraint={"regex": ".*"})
    (finished,) = [event.finished for event in events if event.HasField("finished")]
    assert (finished.stop, finished.constraint_unfinished) == ("t4", True)
