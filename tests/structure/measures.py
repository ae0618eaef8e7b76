"""Counts of a checkout that need no import graph: crowded folders, booleans, repeated names, words and lines."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.structure.tree import Tree, definitions, syntax

MAX_MODULES = 15
# One file per command, in earlier trees.
COMMAND_FOLDERS = frozenset({"client/cli"})

VAGUE_WORDS = re.compile(r"\b(nobody|somebody|whoever)\b", re.IGNORECASE)
TEXT_SUFFIXES = frozenset(
    {".py", ".md", ".lua", ".cpp", ".h", ".js", ".css", ".html", ".proto", ".toml", ".yaml", ".txt"}
)
# Generated from the `.proto` files, or the output of a benchmark.
LEFT_OUT = re.compile(r"protos/gen/|inflight/(v1|kserve)/|bench/reports/|.*__pycache__/")


def crowded_folders(tree: Tree) -> dict[str, int]:
    """Folders with more modules than `MAX_MODULES`, except those of commands, with their number."""
    sizes = tree.folders()
    return {folder: n for folder, n in sizes.items() if n > MAX_MODULES and folder not in COMMAND_FOLDERS}


def booleans(tree: Tree, class_name: str) -> list[str]:
    """Attributes of a class of the router that are annotated as bool, or that a method assigns True or False."""
    classes = [node for node in _classes(tree, "router") if node.name == class_name]
    return sorted({name for node in classes for name in _booleans(node)})


def names_defined_twice(tree: Tree, packages: Sequence[str]) -> dict[str, list[str]]:
    """Public classes and functions at the top level of more than one module, with these modules.

    Left out: `main`, which every program has; constants, whose name is read together with their module's (`log`,
    `FOLDER`); methods, which a Protocol can prescribe; generated code.
    """
    modules: dict[str, list[str]] = {}
    for module, path in tree.of(*packages).items():
        for name, node in definitions(path):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not name.startswith("_"):
                modules.setdefault(name, []).append(module)
    return {name: where for name, where in sorted(modules.items()) if len(where) > 1 and name != "main"}


def num_vague_words(root: Path, paths: Sequence[str]) -> int:
    """Occurrences of nobody, somebody and whoever in files and in what lies below folders."""
    return sum(len(VAGUE_WORDS.findall(text)) for text in _texts(root, paths, TEXT_SUFFIXES))


def num_lines(root: Path, folders: Sequence[str], suffixes: Sequence[str]) -> int:
    """Lines that are not blank, in files of these suffixes below some folders."""
    texts = _texts(root, folders, frozenset(suffixes))
    return sum(1 for text in texts for line in text.splitlines() if line.strip())


def _classes(tree: Tree, package: str) -> Iterator[ast.ClassDef]:
    for path in tree.of(package).values():
        yield from (node for node in syntax(path).body if isinstance(node, ast.ClassDef))


def _booleans(cls: ast.ClassDef) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(cls):
        match node:
            case ast.Assign(targets=targets, value=ast.Constant(value=bool())):
                found.update(target.attr for target in targets if isinstance(target, ast.Attribute))
                found.update(target.id for target in targets if isinstance(target, ast.Name) and node in cls.body)
            case ast.AnnAssign(target=ast.Attribute(attr=name) | ast.Name(id=name), annotation=ast.Name(id="bool")):
                found.add(name)
    return found


def _texts(root: Path, names: Sequence[str], suffixes: frozenset[str]) -> Iterator[str]:
    for name in names:
        for path in (root / name, *sorted((root / name).rglob("*"))):
            is_left_out = LEFT_OUT.match(path.relative_to(root).as_posix())
            if path.suffix in suffixes and path.is_file() and not is_left_out:
                yield path.read_text(encoding="utf-8")
