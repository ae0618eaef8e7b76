"""The code map names what is there: files, the functions and classes in them, and every package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
MAP = (REPOSITORY / "docs" / "design" / "code-map.md").read_text(encoding="utf-8")
PATH = re.compile(r"`((?:[\w-]+/)+[\w.-]+|[a-z]+)`")
NAMED = re.compile(r"`((?:\w+/)+\w+\.py)` `([\w.]+)`")
MAX_STEPS = 12


def names_in(path: Path) -> set[str]:
    """Functions and classes of a module, methods as Class.method."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            names.update(f"{node.name}.{method.name}" for method in methods)
    return names


def test_names_of_the_code_map_are_there() -> None:
    named = NAMED.findall(MAP)
    assert len(named) > MAX_STEPS
    assert not [f"{path} {name}" for path, name in named if name not in names_in(REPOSITORY / path)]


def test_life_of_a_request_has_few_steps() -> None:
    assert len(re.findall(r"^\| \d+ \|", MAP, re.MULTILINE)) <= MAX_STEPS


def test_code_map_has_a_line_for_every_package() -> None:
    listed = set(PATH.findall(MAP))
    packages = {
        folder.parent.relative_to(REPOSITORY).as_posix()
        for top in ("router", "executor", "common", "gateway")
        for folder in (REPOSITORY / top).glob("*/__init__.py")
    }
    assert packages <= listed, packages - listed
    assert not [path for path in listed if "/" in path and not (REPOSITORY / path).exists()]
