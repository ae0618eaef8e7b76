"""The functions that a request passes on its way to an executor, and a token on its way back.

A list under `paths/` names them in order, for one state of the tree: `module:qualified name` a line, below `[in]` and
`[out]`. Below `[left out]` are the modules of the router that a request enters without passing through them. A list
belongs to a tree if every function that it names is there, so a list that has become wrong is noticed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.structure.tree import Tree, syntax

FOLDER = Path(__file__).parent / "paths"
WAYS = ("in", "out")
LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True)
class RequestPath:
    """One list: its file's name, the functions of each way, and the modules that are left out."""

    name: str
    functions: dict[str, tuple[str, ...]]
    left_out: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> RequestPath:
        """Reads a list. A line that begins with # is a comment."""
        sections: dict[str, list[str]] = {name: [] for name in (*WAYS, LEFT_OUT)}
        section = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("["):
                section = line.strip("[]")
            elif line and not line.startswith("#"):
                sections[section].append(line)
        return cls(path.stem, {way: tuple(sections[way]) for way in WAYS}, tuple(sections[LEFT_OUT]))

    def modules(self, way: str) -> list[str]:
        """The modules that one way leads through, each once, in the order of first entry."""
        return list(dict.fromkeys(line.split(":")[0] for line in self.functions[way]))

    def missing(self, tree: Tree) -> list[str]:
        """The lines that name nothing in this tree."""
        lines = [line for way in WAYS for line in self.functions[way]]
        return [line for line in lines if not _is_defined(line, tree)]


def all_paths() -> list[RequestPath]:
    """All committed lists."""
    return [RequestPath.read(path) for path in sorted(FOLDER.glob("*.txt"))]


def path_of(tree: Tree) -> RequestPath:
    """The list that fits a tree best; one that fits has nothing missing."""
    return min(all_paths(), key=lambda path: len(path.missing(tree)))


def _is_defined(line: str, tree: Tree) -> bool:
    module, _, name = line.partition(":")
    path = tree.modules.get(module)
    return path is not None and name in set(_qualified_names(syntax(path).body))


def _qualified_names(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Classes and functions, nested ones with the names around them."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name
            yield from _qualified_names(node.body, f"{prefix}{node.name}.")
