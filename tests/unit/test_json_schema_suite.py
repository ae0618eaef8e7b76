"""JSON-Schema-Test-Suite: what a grammar accepts is valid; what is valid is accepted, apart from a few listed cases."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from inflight.router.constraint.json_schema import FORMATS
from inflight.router.constraint.source import ConstraintError, ConstraintSource
from inflight.router.constraint.worker import Compiler
from tests.support.text.grammars import accepts

FOLDER = Path(__file__).parents[2] / ".clients" / "json-schema-suite"
PACKAGE = "jsonschema==4.26.0"
DIALECTS = {
    "draft2020-12": {},
    "draft7": {"$schema": "http://json-schema.org/draft-07/schema#"},
    "draft4": {"$schema": "http://json-schema.org/draft-04/schema#"},
}
MAX_TEXTS = 200


class NotFetchedError(Exception):
    """The suite could not be fetched. The text is the reason."""


def fetched_suite() -> Path:
    """Returns the folder with a folder for each draft. Raises `NotFetchedError`."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / ".lock"):
        if not (FOLDER / "tests").exists():
            _fetch()
    return FOLDER / "tests"


def _fetch() -> None:
    name = PACKAGE.partition("==")[0]
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-input", "--no-deps", "--no-binary", name]
        try:
            subprocess.run([*command, "-d", folder, PACKAGE], check=True, capture_output=True, text=True, timeout=180)
        except subprocess.CalledProcessError as error:
            raise NotFetchedError(error.stderr.strip().splitlines()[-1]) from None
        except subprocess.TimeoutExpired:
            raise NotFetchedError(f"{PACKAGE} was not downloaded in 180 s") from None
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        next(Path(folder).glob("*/json/tests")).rename(FOLDER / "tests")


@dataclass(slots=True)
class FileResult:
    """Counts of one file's cases, and the wrong ones."""

    counts: Counter[str] = field(default_factory=Counter)
    accepted_invalid: list[str] = field(default_factory=list)
    rejected_valid: list[str] = field(default_factory=list)


def results(suite: Path, draft: str) -> Iterator[tuple[str, FileResult]]:
    """Yields the result of every file of a draft."""
    compiler = Compiler()
    for file in sorted((suite / draft).rglob("*.json")):
        result = FileResult()
        for group in json.loads(file.read_text(encoding="utf-8")):
            _judge(compiler, group, DIALECTS[draft], result)
        yield str(file.relative_to(suite / draft)), result


def _judge(compiler: Compiler, group: dict[str, Any], dialect: dict[str, str], result: FileResult) -> None:
    schema = group["schema"]
    if isinstance(schema, dict):
        schema = {**dialect, **schema}
    try:
        grammar = compiler.compile(ConstraintSource("json_schema", (json.dumps(schema),)).to_json())
    except ConstraintError:
        result.counts["refused"] += len(group["tests"])
        return
    for test in group["tests"]:
        texts = itertools.islice(texts_of(test["data"]), MAX_TEXTS)
        is_accepted = any(accepts(grammar, text) for text in texts)
        if is_accepted == test["valid"]:
            result.counts["right"] += 1
        else:
            wrong = result.accepted_invalid if is_accepted else result.rejected_valid
            wrong.append(f"{group['description']}: {test['description']}")
            result.counts["wrong"] += 1


def texts_of(value: Any) -> Iterator[str]:
    """Yields JSON texts of a value."""
    if isinstance(value, dict):
        orders = itertools.permutations(value) if len(value) <= 4 else iter([tuple(value)])
        for names in orders:
            for texts in itertools.product(*(_few_texts(value[name]) for name in names)):
                members = (
                    f"{json.dumps(name, ensure_ascii=False)}:{text}" for name, text in zip(names, texts, strict=True)
                )
                yield "{" + ",".join(members) + "}"
    elif isinstance(value, list):
        for texts in itertools.product(*map(_few_texts, value)):
            yield "[" + ",".join(texts) + "]"
    elif isinstance(value, float) and value.is_integer():
        yield from (json.dumps(value), str(int(value)))
    else:
        yield json.dumps(value, ensure_ascii=False)


def _few_texts(value: Any) -> list[str]:
    return list(itertools.islice(texts_of(value), 24))


pytestmark = pytest.mark.slow

# Valid values that are never generated. It does no harm: the output satisfies the schema.
REJECTED_VALID = {
    "draft2020-12": {
        "optional/bignum.json": (2, "larger bounds are replaced by 2^53"),
        "format.json": (10, "formats are enforced here; the draft only allows that"),
        "optional/format/date-time.json": (2, "leap seconds are left out"),
        "optional/format/email.json": (5, "quoted local parts and address literals are left out"),
        "optional/format/hostname.json": (1, "hyphens in a row are left out"),
        "optional/format/ipv6.json": (4, "IPv4 within IPv6 is left out"),
        "optional/format/time.json": (6, "leap seconds are left out"),
    },
    "draft7": {
        "optional/bignum.json": (2, "larger bounds are replaced by 2^53"),
        "optional/format/date-time.json": (2, "leap seconds are left out"),
        "optional/format/hostname.json": (1, "hyphens in a row are left out"),
        "optional/format/ipv6.json": (4, "IPv4 within IPv6 is left out"),
        "optional/format/time.json": (6, "leap seconds are left out"),
    },
    "draft4": {
        "optional/bignum.json": (2, "larger bounds are replaced by 2^53"),
        "optional/format/date-time.json": (2, "leap seconds are left out"),
        "optional/format/hostname.json": (1, "hyphens in a row are left out"),
        "optional/format/ipv6.json": (4, "IPv4 within IPv6 is left out"),
    },
}
# Annotations that a validator may check, and 1.0, which is an integer in later drafts.
NOT_CHECKED = ("optional/content.json", "optional/zeroTerminatedFloats.json", "optional/format/")
CHECKED_FORMATS = tuple(f"optional/format/{name}.json" for name in sorted(FORMATS))
# Of 1,906, 1,465 and 863 cases; most others are refused.
LEAST_RIGHT = {"draft2020-12": 1150, "draft7": 1080, "draft4": 690}


@pytest.mark.parametrize("draft", ["draft2020-12", "draft7", "draft4"])
def test_what_a_grammar_accepts_is_valid(draft: str) -> None:
    try:
        suite = fetched_suite()
    except NotFetchedError as error:
        pytest.skip(f"the suite cannot be fetched: {error}")
    counts: Counter[str] = Counter()
    accepted_invalid, rejected_valid = [], {}
    for name, result in results(suite, draft):
        counts += result.counts
        if name.startswith(CHECKED_FORMATS) or not name.startswith(NOT_CHECKED):
            accepted_invalid += [f"{name}: {text}" for text in result.accepted_invalid]
        if result.rejected_valid:
            rejected_valid[name] = len(result.rejected_valid)
    assert accepted_invalid == []
    assert rejected_valid == {name: number for name, (number, _) in REJECTED_VALID[draft].items()}
    assert counts["right"] >= LEAST_RIGHT[draft]
