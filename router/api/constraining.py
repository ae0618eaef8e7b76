"""Compiling of constraints for requests, outside the event loop.

A constraint that no other request had before goes to a compiling process; its grammar or its refusal is remembered. A
process takes 0.13 s of processor time to start, and 30 MiB. One starts behind the router's start, so that the first
constraint need not wait for it, and the other one when two constraints are compiled at a time.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from inflight.common.errors import FieldViolation, Reason, RequestError, invalid
from inflight.router.api.tokenizer_turns import TokenizerTurns
from inflight.router.constraint.answer_grammar import AnswerRules
from inflight.router.constraint.process import (
    TOO_LARGE,
    TOO_LONG,
    CompilerFailedError,
    CompilerLostError,
    CompilerTimeoutError,
    CompilingProcess,
)
from inflight.router.constraint.source import MAX_CONSTRAINT_BYTES, TOOLS, ConstraintError, ConstraintSource
from inflight.router.request.errors import RETRY_AFTER_MS

log = logging.getLogger(__name__)

# One per tenant at a time, so that a tenant whose constraints take long does not hold both.
NUM_PROCESSES = 2
# Text of one tenant that may wait for a process.
MAX_WAITING_BYTES = 16 * MAX_CONSTRAINT_BYTES
# Text of constraints, grammars and refusals that are remembered.
MAX_REMEMBERED_BYTES = 16 * 1024 * 1024

# Functions that are compiled alone although that ends a compiling process, each after seconds.
MAX_COSTLY_FUNCTIONS = 3
# Different words of schemas that are logged.
MAX_LOGGED_WORDS = 1000
COSTLY = frozenset({TOO_LONG, TOO_LARGE})
NOT_TRIED = "the schema was not compiled, because those of other functions take too long"

# Where the field is not named after the kind.
_FIELDS = {"choice": "constraint.choice.choices", TOOLS: "chat.functions"}


@dataclass(frozen=True, slots=True)
class Compiled:
    """A canonical grammar. `unenforced` are the functions whose parameters it does not enforce, each with the
    reason. `ignored` are keywords and formats of its schemas that JSON Schema does not know."""

    grammar: str
    unenforced: Mapping[str, str] = field(default_factory=dict)
    ignored: Sequence[str] = ()

    @property
    def num_bytes(self) -> int:
        """Approximate size of its text."""
        return len(self.grammar) + sum(len(name) + len(reason) for name, reason in self.unenforced.items())


class Constraining:
    """Turns constraints into grammars, for all models. All calls come from one event loop."""

    def __init__(self, start: Callable[[], CompilingProcess] = CompilingProcess) -> None:
        self._start = start
        self._turns = TokenizerTurns(NUM_PROCESSES, MAX_WAITING_BYTES, "compile")
        # Processes without work. A thread takes one and puts it back: never more than there are threads.
        self._idle: list[CompilingProcess] = []
        # By the constraint's text: its grammar, or why there is none. The least recently used is first.
        self._results: OrderedDict[str, Compiled | ConstraintError] = OrderedDict()
        self._remembered_bytes = 0
        self._logged: set[str] = set()
        # Equal constraints that come together are compiled once.
        self._compiling: dict[str, asyncio.Task[Compiled | ConstraintError]] = {}

    async def start_process(self) -> None:
        """Starts a process, so that the first constraint need not wait for that."""
        await self._turns.run("", 0, lambda: self._put(self._take()))

    async def compiled(self, source: ConstraintSource, tenant: str) -> Compiled:
        """Returns the canonical grammar of a constraint. Raises `RequestError`."""
        key = source.to_json()
        result = self._results.get(key)
        if result is None:
            result = await asyncio.shield(self._compiling.get(key) or self._begin(key, source, tenant))
        else:
            self._results.move_to_end(key)
        if isinstance(result, ConstraintError):
            field = _FIELDS.get(source.kind, f"constraint.{source.kind}")
            raise invalid(*(FieldViolation(field, violation) for violation in result.violations))
        return result

    def _begin(self, key: str, source: ConstraintSource, tenant: str) -> asyncio.Task[Compiled | ConstraintError]:
        """Starts to compile a constraint. That goes on if the request is cancelled: the result helps the next one."""

        def end(task: asyncio.Task[Compiled | ConstraintError]) -> None:
            del self._compiling[key]
            if not task.cancelled() and task.exception() is None:
                self._remember(key, task.result())
                _log_unenforced(tenant, task.result())
                self._log_ignored(task.result())

        task = asyncio.create_task(self._turns.run(tenant, len(key), lambda: self._compile(source)))
        self._compiling[key] = task
        task.add_done_callback(end)
        return task

    def _compile(self, source: ConstraintSource) -> Compiled | ConstraintError:
        """Compiles in a process. Blocks. Raises `RequestError` if that says nothing about the constraint."""
        try:
            return self._compiled(source)
        except CompilerFailedError:
            raise RequestError(Reason.INTERNAL, "the constraint could not be compiled") from None
        except CompilerLostError:
            text = "the process that compiles constraints was ended; try again"
        except CompilerTimeoutError:
            text = "the constraint was not compiled in time: the router is overloaded; try again"
        raise RequestError(Reason.QUEUE_FULL, text, retry_after_ms=RETRY_AFTER_MS, quota="compiling of constraints")

    def _compiled(self, source: ConstraintSource) -> Compiled | ConstraintError:
        try:
            return self._ask(source)
        except ConstraintError as error:
            if source.tools is None or not source.tools.loose:
                return error
            return self._compiled_tools(source, source.tools, error)

    def _compiled_tools(
        self, source: ConstraintSource, rules: AnswerRules, error: ConstraintError
    ) -> Compiled | ConstraintError:
        """Compiles tools again without the parameters that cannot be enforced, unless they must be. `error` is that of
        all tools together."""
        try:
            least = self._ask(source.of_tools(rules.relaxed(rules.loose)))
        except ConstraintError as refused:
            return refused  # no loose tool is at fault
        unenforced = self._unenforceable(source, rules, error)
        try:
            if unenforced:
                return replace(self._ask(source.of_tools(rules.relaxed(unenforced))), unenforced=unenforced)
        except ConstraintError as without_these:
            error = without_these
        # Each can be enforced alone, but not all together.
        reason = f"the schema cannot be enforced together with those of the other functions: {error}"
        return replace(least, unenforced={name: unenforced.get(name, reason) for name in rules.loose})

    def _unenforceable(self, source: ConstraintSource, rules: AnswerRules, error: ConstraintError) -> dict[str, str]:
        """Returns the loose tools whose parameters cannot be enforced, with the reasons. `error` is that of all tools
        together."""
        if len(rules.loose) == 1 and _is_costly(error):
            return {rules.loose[0]: _reason(rules.loose[0], error)}
        reasons: dict[str, str] = {}
        num_costly = 0
        for name in rules.loose:
            if num_costly == MAX_COSTLY_FUNCTIONS:
                reasons[name] = NOT_TRIED
                continue
            try:
                self._ask(source.of_tools(rules.alone(name)))
            except ConstraintError as error:
                reasons[name] = _reason(name, error)
                num_costly += _is_costly(error)
        return reasons

    def _ask(self, source: ConstraintSource) -> Compiled:
        process = self._take()
        try:
            grammar, ignored = process.compile(source)
        except CompilerLostError:
            process = self._start()
            grammar, ignored = process.compile(source)
        finally:
            self._put(process)
        return Compiled(grammar, ignored=ignored)

    def _take(self) -> CompilingProcess:
        while self._idle:
            process = self._idle.pop()
            if process.is_alive:
                return process
            process.close()
        return self._start()

    def _put(self, process: CompilingProcess) -> None:
        """Keeps a process. Replaces one that has ended at once, so that the next constraint need not wait for that."""
        if not process.is_alive:
            process.close()
            process = self._start()
        self._idle.append(process)

    def _log_ignored(self, result: Compiled | ConstraintError) -> None:
        """Logs words of schemas without effect, each once."""
        if isinstance(result, Compiled) and len(self._logged) < MAX_LOGGED_WORDS:
            for word in set(result.ignored) - self._logged:
                log.info("JSON schemas: %s is unknown to JSON Schema and has no effect", word)
            self._logged.update(result.ignored)

    def _remember(self, key: str, result: Compiled | ConstraintError) -> None:
        self._results[key] = result
        self._remembered_bytes += _num_bytes(key, result)
        while self._remembered_bytes > MAX_REMEMBERED_BYTES:
            self._remembered_bytes -= _num_bytes(*self._results.popitem(last=False))


def _is_costly(error: ConstraintError) -> bool:
    return not COSTLY.isdisjoint(error.violations)


def _reason(name: str, error: ConstraintError) -> str:
    """Returns what is wrong with the schema of a function, without the beginning that names both."""
    schema = re.compile(rf"{re.escape(name)}: parameters:? ")
    return "; ".join(schema.sub("the schema ", violation, count=1) for violation in error.violations)


def _num_bytes(key: str, result: Compiled | ConstraintError) -> int:
    return len(key) + (result.num_bytes if isinstance(result, Compiled) else len(str(result)))


def _log_unenforced(tenant: str, result: Compiled | ConstraintError) -> None:
    if isinstance(result, Compiled):
        for name, reason in result.unenforced.items():
            log.warning("the parameters of the function %s of tenant %s are not enforced: %s", name, tenant, reason)
