"""Style rules: short functions, descriptive names, no notes to self."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.contract.test_imports import EVERYWHERE, PRODUCT, REPOSITORY, imports_of, parsed, sources

MAX_FUNCTION_LINES = 60
MIN_PATIENCE_S = 30.0
EMPTY_NAMES = frozenset(
    {"manager", "managers", "handler", "handlers", "util", "utils", "helper", "helpers", "data", "info", "job", "jobs"}
)
# gRPC's own, of an interceptor's parameter; asyncio's and uvicorn's, of a connection's methods.
GIVEN_NAMES = frozenset(
    {"call_exception_handler", "data_received", "handler_call_details", "timeout_keep_alive_handler"}
)


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sources(*EVERYWHERE):
        yield path.relative_to(REPOSITORY), parsed(path)


def names_given(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names that a reader meets outside the function that gives them, with their line; locals are left alone."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno
            case ast.AnnAssign(target=ast.Name() as target):
                yield target.id, node.lineno


def words_of(name: str) -> list[str]:
    """`KvBlock_pool` → kv, block, pool."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def is_empty_name(name: str, imports: set[str]) -> bool:
    # A task is asyncio's.
    empty = EMPTY_NAMES if "asyncio" in imports else EMPTY_NAMES | {"task", "tasks"}
    return not empty.isdisjoint(words_of(name))


def test_functions_are_short() -> None:
    long = [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not long


def test_names_say_what_a_thing_is() -> None:
    empty = [
        f"{path}:{line} {name}"
        for path, tree in trees()
        for imports in (imports_of(REPOSITORY / path),)
        for name, line in names_given(tree)
        if name not in GIVEN_NAMES and is_empty_name(name, imports)
    ]
    empty += [str(path) for path, _ in trees() if is_empty_name(path.stem, set())]
    assert not empty


def test_modules_say_what_they_own() -> None:
    assert not [str(path) for path, tree in trees() if path.name != "__init__.py" and not ast.get_docstring(tree)]


def test_no_clock_of_a_router_enters_a_decision() -> None:
    """Time of day differs between machines: routers measure durations and leave the time to Redis. Credentials expire
    by the time of day, so authentication needs it."""
    time_of_day = re.compile(r"\btime\.(time|time_ns|localtime|gmtime)\b|\bdatetime\b")
    told_the_time = {path.name for path in sources("router") if time_of_day.search(path.read_text(encoding="utf-8"))}
    assert told_the_time <= {"api_keys.py", "authenticator.py"}


def test_product_waits_with_a_timeout_that_loses_no_cancel() -> None:
    """`asyncio.wait_for` of Python 3.11 drops a cancel that comes just as what it waits for is done; `asyncio.timeout`
    does not."""
    waiting = {path.name for path in sources(*PRODUCT) if "asyncio.wait_for(" in path.read_text(encoding="utf-8")}
    assert not waiting


def test_tests_wait_long_for_what_must_come() -> None:
    """A machine that stands still for seconds must fail no test; what hangs is found by a longer wait as well."""
    limit = re.compile(r"asyncio\.timeout\((\d+(?:\.\d+)?)\)|asyncio\.wait_for\([^=\n]*, (\d+(?:\.\d+)?)\)")
    short = [
        f"{path.relative_to(REPOSITORY)}: {found.group()}"
        for path in sources("tests")
        for found in limit.finditer(path.read_text(encoding="utf-8"))
        if float(found.group(1) or found.group(2)) < MIN_PATIENCE_S
    ]
    assert not short


def test_no_note_to_ourselves_is_left() -> None:
    note = re.compile(r"#.*\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)) + r")\b")
    assert not [str(path) for path in sources(*EVERYWHERE) if note.search(path.read_text(encoding="utf-8"))]
