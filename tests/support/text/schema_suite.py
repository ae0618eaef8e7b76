"""JSON-Schema-Test-Suite, from the source distribution of `jsonschema`, against canonical grammars.

Fetched once into `.clients/json-schema-suite`. A value counts as accepted if any of its texts is: llguidance fixes the
order of properties, and 1 and 1.0 are equal. `python -m tests.support.text.schema_suite` prints the table.
"""

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

from filelock import FileLock

from inflight.router.constraint.source import ConstraintError, ConstraintSource
from inflight.router.constraint.worker import Compiler
from tests.support.text.grammars import accepts

FOLDER = Path(__file__).parents[3] / ".clients" / "json-schema-suite"
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


def main() -> None:
    """Prints the counts of each file."""
    suite = fetched_suite()
    for draft in DIALECTS:
        total: Counter[str] = Counter()
        for name, result in results(suite, draft):
            total += result.counts
            print(f"{draft}/{name}: {dict(result.counts)}")
            for text in (*result.accepted_invalid, *result.rejected_valid):
                print(f"    wrong: {text}")
        print(f"{draft}: {dict(total)}")


if __name__ == "__main__":
    main()
