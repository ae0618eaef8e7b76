"""The structure of one or more checkouts, side by side: `python -m tests.structure.report [TREE …]`.

A TREE is a folder, or a revision of this repository that is unpacked into a temporary folder; without one it is the
current folder. `python -m tests.structure.report 712dbce .` compares the state before the restructuring with now.
`--details` lists what the counts consist of. `--trace` runs one request through each tree and counts the modules of the
router that it enters.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path

from inflight.local.redis_server import PrivateRedis
from tests.structure.measures import (
    booleans,
    crowded_folders,
    names_defined_twice,
    num_lines,
    num_vague_words,
)
from tests.structure.request_path import path_of
from tests.structure.tree import PACKAGES, PRODUCT, Tree, cycles, num_levels

TRACE = Path(__file__).with_name("trace.py")
OTHER_LANGUAGES = (".lua", ".cpp", ".h", ".js", ".css", ".html", ".proto")

PAGES = ("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
OTHERS = ("bench", "deploy", "protos", "tests")

Row = tuple[str, Callable[[Tree], str]]


def rows() -> list[Row]:
    """What the report shows: a label, and how to measure it."""
    return [
        *((f"modules in {package}/ itself", _modules_in(package)) for package in PACKAGES),
        ("folders with more than 15 modules", lambda tree: str(len(crowded_folders(tree)))),
        *((f"{package}: parts, levels, arrows", _shape_of(package)) for package in ("router", "executor")),
        ("parts in an import cycle", lambda tree: str(sum(map(len, _cycles(tree))))),
        ("files on a request's way in", lambda tree: _num_files(tree, "in")),
        ("files on a token's way out", lambda tree: _num_files(tree, "out")),
        ("booleans of RequestStream", lambda tree: str(len(booleans(tree, "RequestStream")))),
        ("booleans of Lifecycle, its state machine", lambda tree: str(len(booleans(tree, "Lifecycle")))),
        ("classes and functions defined twice, product", lambda tree: str(len(names_defined_twice(tree, PRODUCT)))),
        ("the same with bench", lambda tree: str(len(names_defined_twice(tree, PACKAGES)))),
        ("nobody/somebody/whoever, product and docs", lambda tree: str(num_vague_words(tree.root, (*PRODUCT, *PAGES)))),
        ("the same in bench, deploy, protos and tests", lambda tree: str(num_vague_words(tree.root, OTHERS))),
        ("lines of Python, product", lambda tree: str(num_lines(tree.root, PRODUCT, (".py",)))),
        ("lines of other languages, product", lambda tree: str(num_lines(tree.root, PRODUCT, OTHER_LANGUAGES))),
        ("lines of Python, bench", lambda tree: str(num_lines(tree.root, ("bench",), (".py",)))),
        ("lines of Python, tests", lambda tree: str(num_lines(tree.root, ("tests",), (".py",)))),
    ]


TRACED: Row = ("modules of router that a request enters, traced", lambda tree: str(len(_traced_modules(tree.root))))


def table(names: Sequence[str], trees: Sequence[Tree], shown: Sequence[Row]) -> str:
    """The report as a Markdown table, a column for each tree."""
    lines = [["", *names], ["---"] + ["---:"] * len(trees)]
    lines += [[label, *(measure(tree) for tree in trees)] for label, measure in shown]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def details(name: str, tree: Tree) -> str:
    """What the counts of one tree consist of."""
    path = path_of(tree)
    crowded = (f"{folder} {size}" for folder, size in crowded_folders(tree).items())
    paragraphs = [
        f"## {name}",
        f"Folders with more than 15 modules: {_joined(crowded)}",
        f"Cycles between parts: {_joined(' ↔ '.join(group) for group in _cycles(tree))}",
        f"Request path: paths/{path.name}.txt; not there: {_joined(path.missing(tree))}",
        f"Way in: {_joined(path.modules('in'))}",
        f"Way out: {_joined(path.modules('out'))}",
        f"Booleans of RequestStream: {_joined(booleans(tree, 'RequestStream'))}",
        *(
            f"Defined twice: {name} in {', '.join(modules)}"
            for name, modules in names_defined_twice(tree, PACKAGES).items()
        ),
    ]
    return "\n\n".join(paragraphs)


def _joined(texts: Iterator[str] | Sequence[str]) -> str:
    return ", ".join(texts) or "none"


def _modules_in(package: str) -> Callable[[Tree], str]:
    return lambda tree: str(tree.folders().get(package, "–"))


def _shape_of(package: str) -> Callable[[Tree], str]:
    def measure(tree: Tree) -> str:
        graph = tree.rooms(package)
        return f"{len(graph)}, {num_levels(graph)}, {sum(map(len, graph.values()))}"

    return measure


def _cycles(tree: Tree) -> list[tuple[str, ...]]:
    return [group for package in PRODUCT for group in cycles(tree.rooms(package))]


def _num_files(tree: Tree, way: str) -> str:
    path = path_of(tree)
    missing = path.missing(tree)
    return f"{len(path.modules(way))}" + (f" ({len(missing)} functions of the list are not there)" if missing else "")


def _traced_modules(root: Path) -> list[str]:
    """The modules that a request enters in a tree, which runs in a process of its own."""
    with tempfile.TemporaryDirectory() as folder, PrivateRedis.start(Path(folder) / "redis.log") as redis:
        finished = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", str(TRACE), redis.url],
            cwd=root,
            env={**os.environ, "PYTHONPATH": f"{root}:{root / 'protos' / 'gen'}"},
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
    return finished.stdout.split()


@contextlib.contextmanager
def _checked_out(name: str) -> Iterator[Path]:
    """The folder of a tree that is a folder, or a revision."""
    if Path(name).is_dir():
        yield Path(name).resolve()
        return
    archive = subprocess.run(["git", "archive", name], check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
        yield Path(folder)


def main() -> None:
    """Prints the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.structure.report", description=__doc__.split("\n")[0])
    parser.add_argument("trees", metavar="TREE", nargs="*", default=["."], help="a folder or a revision (default .)")
    parser.add_argument("--details", action="store_true", help="list what the counts consist of")
    parser.add_argument("--trace", action="store_true", help="run one request through each tree")
    options = parser.parse_args()
    shown = [*rows(), TRACED] if options.trace else rows()
    with contextlib.ExitStack() as stack:
        trees = [Tree.read(stack.enter_context(_checked_out(name))) for name in options.trees]
        print(table(options.trees, trees, shown))
        if options.details:
            print(*(f"\n{details(name, tree)}" for name, tree in zip(options.trees, trees, strict=True)), sep="\n")


if __name__ == "__main__":
    main()
