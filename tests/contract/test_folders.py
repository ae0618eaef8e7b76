"""Folders are concepts: few modules in each, and no import cycles between them."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.contract.test_imports import PACKAGES, PRODUCT, REPOSITORY, package_of, parsed, sources

MAX_MODULES = 15

Graph = Mapping[str, frozenset[str]]


def modules(*packages: str) -> Iterator[Path]:
    """The modules of packages. An empty `__init__.py` is none."""
    return (path for path in sources(*packages) if path.stat().st_size)


def imported_names(path: Path) -> Iterator[str]:
    """Full names that a module imports, also inside functions: `a.b` of `import a.b`, `a.b.c` of `from a.b import c`,
    where `c` is a module or a name in one."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def part_of(package: str, name: str) -> str | None:
    """The part of a package that has a module or a name in one; None outside the package. A part is a folder directly
    below the package, with the folders in it, or a module that lies in the package itself (entry points and settings,
    which no folder could hold without a cycle)."""
    if package_of(name) != package:
        return None
    first = name.removeprefix("inflight.").removeprefix(f"{package}.").partition(".")[0]
    exists = (REPOSITORY / package / first).is_dir() or (REPOSITORY / package / f"{first}.py").exists()
    return first if exists else "__init__"


def parts(package: str) -> Graph:
    """Which parts of a package import which."""
    graph: dict[str, set[str]] = {}
    for path in modules(package):
        part = path.relative_to(REPOSITORY / package).parts[0].removesuffix(".py")
        graph.setdefault(part, set()).update(
            other for name in imported_names(path) if (other := part_of(package, name)) is not None
        )
    return {part: frozenset(used & graph.keys()) - {part} for part, used in graph.items()}


def cycles(graph: Graph) -> list[tuple[str, ...]]:
    """The groups of nodes that can reach each other; none has fewer than two nodes."""
    reached = {node: reach(graph, node) for node in graph}
    groups = {
        tuple(sorted({node, *(other for other in there if node in reached[other])})) for node, there in reached.items()
    }
    return sorted(group for group in groups if len(group) > 1)


def reach(graph: Graph, start: str) -> frozenset[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(graph[node])
    return frozenset(seen)


def test_folder_has_few_modules() -> None:
    folders = (*PACKAGES, "tools", "tests/support")
    sizes = Counter(path.parent.relative_to(REPOSITORY).as_posix() for path in modules(*folders))
    assert sizes
    assert not [folder for folder, size in sizes.items() if size > MAX_MODULES], f"more than {MAX_MODULES} modules"


@pytest.mark.parametrize("package", PRODUCT)
def test_folders_of_a_package_form_no_import_cycle(package: str) -> None:
    assert not cycles(parts(package))


def test_imports_between_folders_are_found() -> None:
    assert "scheduler" in parts("executor")["engine"]


def test_cycle_is_found() -> None:
    graph = {
        "a": frozenset({"b"}),
        "b": frozenset({"c"}),
        "c": frozenset({"b", "d"}),
        "d": frozenset[str](),
    }
    assert cycles(graph) == [("b", "c")]
