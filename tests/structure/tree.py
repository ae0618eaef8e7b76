"""The import graph of a checkout: its modules, its folders, and what they import.

Reads sources only, so it works on any commit. Generated code (`*_pb2.py`, `*_pb2_grpc.py`) and empty `__init__.py`
files do not count as modules.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# `client` was renamed to `inflight`; a checkout has one of them. A module's name begins with its folder, although later
# checkouts import `router.main` as `inflight.router.main`.
PRODUCT = ("router", "executor", "common", "client", "inflight", "gateway")
PACKAGES = (*PRODUCT, "bench")

Graph = Mapping[str, frozenset[str]]


@functools.cache
def syntax(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def imported_names(path: Path) -> frozenset[str]:
    """Absolute names that a file imports, also inside functions: `a.b` of `import a.b`, `a.b.c` of
    `from a.b import c`, where `c` is a module or a name in one."""
    names: set[str] = set()
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


@dataclass(frozen=True, slots=True)
class Tree:
    """The packages of one checkout. `modules` maps a module's full name to its file."""

    root: Path
    modules: Mapping[str, Path]

    @classmethod
    def read(cls, root: Path) -> Tree:
        """Finds the modules of all packages below `root`."""
        files = (path for package in PACKAGES for path in sorted((root / package).rglob("*.py")))
        return cls(root, {_module_name(path.relative_to(root)): path for path in files if _is_module(path)})

    def of(self, *packages: str) -> dict[str, Path]:
        """The modules of some packages."""
        return {name: path for name, path in self.modules.items() if name.split(".")[0] in packages}

    def imports(self, module: str) -> frozenset[str]:
        """The modules of this tree that a module imports."""
        within = (_within_repository(name) for name in imported_names(self.modules[module]))
        named = ((name, name.rpartition(".")[0]) for name in within)
        found = {name if name in self.modules else parent for name, parent in named}
        return frozenset(found & self.modules.keys()) - {module}

    def folders(self) -> dict[str, int]:
        """The number of modules in each folder, by the folder's path with slashes."""
        sizes: dict[str, int] = {}
        for path in self.modules.values():
            folder = path.parent.relative_to(self.root).as_posix()
            sizes[folder] = sizes.get(folder, 0) + 1
        return sizes

    def rooms(self, package: str) -> Graph:
        """Which parts of a package import which. A part is a folder directly below the package, with the folders in it,
        or a module that lies in the package itself (entry points and settings, which no folder could hold without a
        cycle)."""
        graph: dict[str, set[str]] = {}
        for module in self.of(package):
            room = graph.setdefault(_room(module), set())
            room.update(_room(name) for name in self.imports(module) if name.split(".")[0] == package)
        return {room: frozenset(used - {room}) for room, used in graph.items()}


def cycles(graph: Graph) -> list[tuple[str, ...]]:
    """The groups of nodes that can reach each other; none has fewer than two nodes."""
    reached = {node: _reach(graph, node) for node in graph}
    groups = {
        tuple(sorted({node, *(other for other in there if node in reached[other])})) for node, there in reached.items()
    }
    return sorted(group for group in groups if len(group) > 1)


def num_levels(graph: Graph) -> int:
    """The length in nodes of the longest path, where the nodes of a cycle count as one level."""
    level_of = {node: group for group in cycles(graph) for node in group}
    merged = {node: level_of.get(node, (node,)) for node in graph}

    @functools.cache
    def depth(group: tuple[str, ...]) -> int:
        below = {merged[used] for node in group for used in graph[node]} - {group}
        return 1 + max(map(depth, below), default=0)

    return max(map(depth, set(merged.values())), default=0)


def definitions(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    """Names that a module defines at its top level, with their statement."""
    for node in syntax(path).body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name, node
            case ast.Assign(targets=targets):
                yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node
            case _:
                pass


def _reach(graph: Graph, start: str) -> frozenset[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(graph.get(node, ()))
    return frozenset(seen)


def _within_repository(name: str) -> str:
    short = name.removeprefix("inflight.")
    return short if short.partition(".")[0] in PACKAGES else name


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_module(path: Path) -> bool:
    is_generated = path.stem.endswith(("_pb2", "_pb2_grpc"))
    return not is_generated and path.stat().st_size > 0


def _room(module: str) -> str:
    return ".".join(module.split(".")[:2])
