"""Statements of the documentation that can be checked against the sources: commands, flags, paths, links. Reads
Markdown as the repository's browser does, so that a page is right there and not only on the site."""

from __future__ import annotations

import functools
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.contract.test_imports import REPOSITORY

PAGES = (
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "bench/workloads/README.md")),
)
# Names of other systems stand in the first column of these pages' tables.
FOREIGN_FIRST_COLUMN = frozenset({"migration.md", "engines.md"})
SHELL = frozenset({"", "console", "sh", "bash", "shell"})
ENDS_A_COMMAND = frozenset({"|", "||", "&&", "&", ";", ">", ">>", "2>", "2>&1", "<"})
ASSIGNMENT = re.compile(r"[A-Z_]+=.*", re.DOTALL)


@functools.cache
def tokens_of(path: Path) -> list[Token]:
    """A page's tokens, with tables."""
    return MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def code_spans(path: Path) -> Iterator[str]:
    """Returns inline code, except columns with names of other projects."""
    column = 0
    for token in tokens_of(path):
        if token.type == "tr_open":
            column = 0
        if token.type in ("td_open", "th_open"):
            column += 1
        if path.name in FOREIGN_FIRST_COLUMN and column == 1:
            continue
        if token.type == "table_close":
            column = 0
        for child in token.children or ():
            if child.type == "code_inline":
                yield child.content


def command_lines(path: Path) -> Iterator[str]:
    """Command lines in blocks of code, those that are continued on the next line joined, and inline ones."""
    for token in tokens_of(path):
        language = token.info.strip().split(" ")[0]
        if token.type == "code_block" or (token.type == "fence" and language in SHELL):
            for line in token.content.replace("\\\n", " ").splitlines():
                if line.startswith("$ ") or re.match(r"\s*(inflight|make) ", line):
                    yield line.removeprefix("$ ").strip()
    yield from (span for span in code_spans(path) if re.match(r"(inflight|make) \S", span))


def commands(path: Path) -> Iterator[list[str]]:
    """The words of each command, variables before it left out; a line may hold several."""
    for line in command_lines(path):
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), ";"]:
            if word in ENDS_A_COMMAND:
                if words:
                    yield words
                words = []
            elif words or not ASSIGNMENT.fullmatch(word):
                words.append(word)


def links(path: Path) -> Iterator[str]:
    """Returns the targets of a page's links and pictures, except external ones."""
    for token in tokens_of(path):
        for child in token.children or ():
            target = child.attrGet("href") if child.type == "link_open" else child.attrGet("src")
            if isinstance(target, str) and not re.match(r"[a-z]+:", target):
                yield target


@functools.cache
def anchors_of(path: Path) -> frozenset[str]:
    """The anchors that the repository's browser gives a page's headings."""
    anchors: dict[str, int] = {}
    found = set()
    tokens = tokens_of(path)
    for opening, inline in itertools.pairwise(tokens):
        if opening.type == "heading_open":
            text = "".join(child.content for child in inline.children or ())
            anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            number = anchors.get(anchor, 0)
            anchors[anchor] = number + 1
            found.add(f"{anchor}-{number}" if number else anchor)
    return frozenset(found)
