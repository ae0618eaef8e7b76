"""The tests that the pages under docs/ and `.ci/interpreters` name are there, and every threat and failure has one: a
promise is as good as the test that proves it."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.contract.docs_text import name_of
from tests.contract.test_imports import REPOSITORY, parsed

DOCS, TESTS = REPOSITORY / "docs", REPOSITORY / "tests"
# `test_x`, `::test_x`, `folder/test_file.py`, `folder/test_file.py::test_x`; a leading `tests/` may be there or not.
NAMED = re.compile(r"`(?:tests/)?((?:\w+/)*test_\w+\.py)?(?:(?:::)?(test_\w+))?`")
BY_HAND = "by hand"


@functools.cache
def functions_of(path: Path) -> frozenset[str]:
    """The names of a file's functions."""
    return frozenset(n.name for n in ast.walk(parsed(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def is_there(file: str, function: str) -> bool:
    """Whether a file, or any where none is named, has the function."""
    paths = [path for path in TESTS.rglob("test_*.py") if not file or path.as_posix().endswith(f"/{file}")]
    return any(not function or function in functions_of(path) for path in paths)


def missing_in(text: str) -> Iterator[str]:
    """The tests that a text names and that are not there; `::test_x` is of the file named last."""
    last = ""
    for found in NAMED.finditer(text):
        file, function = found[1] or "", found[2] or ""
        last = file or last
        within = last if found[0].startswith("`::") else file
        if (file or function) and not is_there(within, function):
            yield found[0]


def rows_of(page: str, heading: str) -> list[str]:
    """The rows of the first table behind a heading."""
    _, _, rest = (DOCS / page).read_text(encoding="utf-8").partition(f"{heading}\n")
    table = re.search(r"(?:^\|.*\n)+", rest, re.MULTILINE)
    assert table is not None, heading
    return table[0].splitlines()[2:]


def test_every_test_that_a_page_names_is_there() -> None:
    missing = {name_of(page): list(missing_in(page.read_text(encoding="utf-8"))) for page in DOCS.rglob("*.md")}
    assert not {page: names for page, names in missing.items() if names}


def test_every_threat_and_every_failure_has_a_test() -> None:
    rows = rows_of("security.md", "## Threats") + rows_of("failures.md", "## What the client sees")
    assert len(rows) > 30
    assert not [row for row in rows if not any(map(any, NAMED.findall(row))) and f"| {BY_HAND} |" not in row]


def test_every_file_that_the_tests_of_other_interpreters_name_is_there() -> None:
    script = (REPOSITORY / ".ci/interpreters").read_text(encoding="utf-8")
    listed = re.search(r"^UNIT=.*?^TESTS=.*?^\)$", script, re.MULTILINE | re.DOTALL)
    assert listed is not None
    command = ["bash", "-c", f'{listed[0]}\necho "${{TESTS[@]}}"']
    named = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split()
    assert len(named) > 30
    assert not [name for name in named if not (REPOSITORY / name).exists()]


def test_a_test_that_is_not_there_is_found() -> None:
    this = "contract/test_documented_tests.py"
    assert not list(missing_in(f"`{this}::test_a_test_that_is_not_there_is_found`, `::is_there`, `tests/{this}`"))
    assert list(missing_in(f"`{this}`, `::test_gone`, `test_gone_too`, `gone/test_gone.py`, `test_settings.py`")) == [
        "`::test_gone`",
        "`test_gone_too`",
        "`gone/test_gone.py`",
    ]
