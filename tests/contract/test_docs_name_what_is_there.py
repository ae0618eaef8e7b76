"""Names in the documentation that must exist: commands and flags, make's targets, variables, metrics, files, links."""

from __future__ import annotations

import argparse
import functools
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.cli.doctor import supported_versions
from inflight.cli.main import ALIASES
from inflight.common.settings import words_of
from tests.contract.docs_text import PAGES, anchors_of, code_spans, commands, links, name_of
from tests.contract.test_imports import PACKAGES, REPOSITORY, sources
from tools.reference.commands import commands_below, parsers
from tools.reference.settings_page import settings_classes

# Flags whose value is flags of these commands.
PASSED_ON = {"--executor-args": "executor", "--router-args": "router", "--gateway-args": "gateway"}
# Flags whose value is flags of another program.
PASSED_ELSEWHERE = frozenset({"--engine-args"})
# Targets of make that run a command and pass ARGS on.
TARGETS_OF_COMMANDS = {"up": "up", "demo": "demo", "bench": "bench"}
EVERYWHERE = frozenset({"--help", "--version"})
FLAG = re.compile(r"--[a-z][a-z0-9]*(-[a-z0-9]+)*")
PATH = re.compile(r"(?:router|executor|common|client|gateway|bench|deploy|docs|tools|tests|protos)/[\w./*-]+")
METRIC = re.compile(r"(?:inflight_|gen_ai_|vllm:)[a-z_]+")
VARIABLE = re.compile(r"\bINFLIGHT_[A-Z][A-Z0-9_]*")
# Triton's, which begin like ours.
NAMES_OF_OTHERS = frozenset({"inflight_batcher_llm", "inflight_batching", "inflight_fused_batching"})
PLACEHOLDER = re.compile(r"[A-Z_]+|…|\.\.\.")


@functools.cache
def flags_of() -> dict[str, frozenset[str]]:
    """The flags of every command."""
    return {name: frozenset(options_of(parser)) | EVERYWHERE for name, parser in parsers().items()}


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The flags of a parser and of its commands."""
    yield from parser._option_string_actions
    for child in commands_below(parser).values():
        yield from options_of(child)


@functools.cache
def source_text() -> str:
    """All our sources, to look a name up in."""
    files = [*sources(*PACKAGES), *(REPOSITORY / "protos").rglob("*.proto"), REPOSITORY / "Makefile"]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def is_in_sources(name: str) -> bool:
    """Whether the sources have it as a whole word."""
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", source_text()) is not None


@functools.cache
def make_targets() -> frozenset[str]:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))


def wrong_flags(command: str, words: list[str]) -> Iterator[str]:
    """The flags among the words that the command does not have."""
    rest = iter(words)
    for word in rest:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in flags_of()[command] and not PLACEHOLDER.search(flag):
            yield f"inflight {command} {flag}"
        if flag in PASSED_ELSEWHERE and "=" not in word:
            next(rest, "")
        if flag in PASSED_ON:
            yield from wrong_flags(PASSED_ON[flag], shlex.split(next(rest, "")))


def wrong_in(words: list[str]) -> Iterator[str]:
    """What a command line names that is not there."""
    match words:
        case ["inflight", name, *rest] if not PLACEHOLDER.fullmatch(name):
            command = ALIASES.get(name, name)
            if command in flags_of():
                yield from wrong_flags(command, rest)
            elif name not in EVERYWHERE:
                yield f"inflight {name}"
        case ["make", *rest]:
            targets = [word for word in rest if re.fullmatch(r"[a-z-]+", word) and not word.startswith("-")]
            yield from (f"make {target}" for target in targets if target not in make_targets())
            arguments = next((word.removeprefix("ARGS=") for word in rest if word.startswith("ARGS=")), "")
            for command in (TARGETS_OF_COMMANDS[target] for target in targets if target in TARGETS_OF_COMMANDS):
                yield from wrong_flags(command, shlex.split(arguments))


def is_flag_somewhere(flag: str) -> bool:
    """Whether a command or one of our programs has the flag."""
    return any(flag in flags for flags in flags_of().values()) or is_in_sources(flag)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_is_one(page: Path) -> None:
    assert not [wrong for words in commands(page) for wrong in wrong_in(words)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_flag_is_one(page: Path) -> None:
    flags = {word for span in code_spans(page) if FLAG.fullmatch(word := re.split(r"[ =]", span)[0])}
    assert not sorted(flag for flag in flags if not is_flag_somewhere(flag))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_variable_is_read(page: Path) -> None:
    settings = {words.variable for _, settings in settings_classes() for words in words_of(settings)}
    named = set(VARIABLE.findall(page.read_text(encoding="utf-8")))
    assert not sorted(
        name for name in named - settings if f'"{name}"' not in source_text() and name != "INFLIGHT_CONFIG"
    )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_metric_is_documented(page: Path) -> None:
    documented = set(METRIC.findall((REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")))
    named = {found[0] for span in code_spans(page) if (found := METRIC.match(span))} - NAMES_OF_OTHERS
    roots = {re.sub(r"_(bucket|sum|count)$", "", name): name for name in named}
    # Claims of tokens, for one, and fields begin with our name, too.
    assert not sorted(root for root in roots if root not in documented and not is_in_sources(root))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_path_is_there(page: Path) -> None:
    words = {*code_spans(page), *(word for command in commands(page) for word in command)}
    named = {word for word in words if PATH.fullmatch(word) and "/my-" not in word}
    assert not sorted(name for name in named if not any(REPOSITORY.glob(name.rstrip("/"))))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    assert not broken


def test_what_is_not_there_is_found() -> None:
    assert list(wrong_in(["inflight", "generate", "--max-tokens", "5", "--gone"])) == ["inflight generate --gone"]
    assert list(wrong_in(["inflight", "up", "--executor-args", "--dtype float32 --gone=1"])) == [
        "inflight executor --gone"
    ]
    assert list(wrong_in(["inflight", "gone", "--help"])) == ["inflight gone"]
    assert list(wrong_in(["make", "gone", "bench", "ARGS=--seats 8 --lost"])) == ["make gone", "inflight bench --lost"]
    assert not list(wrong_in(["inflight", "COMMAND", "--help"]))
    assert not is_flag_somewhere("--no-such-flag")


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_versions_of_python_are_those_of_the_package(page: str) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    *versions, last = supported_versions(project["classifiers"])
    assert project["requires-python"] == f">={versions[0]}"
    assert f"Python {', '.join(versions)} or {last}" in (REPOSITORY / page).read_text(encoding="utf-8")
