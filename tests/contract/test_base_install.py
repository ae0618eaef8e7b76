"""The base installation: the client library and its commands need only the dependencies without extras.

A child process refuses every package that is installed here for another reason, as if it were not there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest

import inflight
from inflight.cli.main import COMMANDS, OURS
from tests.contract.test_imports import REPOSITORY

BASE = [command.name for command in COMMANDS if not command.extra]
OTHERS = {command.name: command.extra for command in COMMANDS if command.extra}

REFUSE = """
import json, os, sys
from importlib.machinery import PathFinder

REFUSED = frozenset(json.loads(os.environ["REFUSED"]))


class Refuse(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in REFUSED else PathFinder.find_spec(name, path, target)


sys.meta_path = [Refuse if finder is PathFinder else finder for finder in sys.meta_path]
"""
COMMAND = "from inflight.cli.main import main; sys.exit(main(sys.argv[1:]))"


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(requirements: list[str]) -> set[str]:
    """The distributions that these requirements bring, without extras and what is not installed here."""
    found: set[str] = set()
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        name = normalized(re.split(r"[ <>=!~;\[(]", requirement, maxsplit=1)[0])
        if name in found or "extra ==" in requirement:
            continue
        try:
            waiting += metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # of another platform or Python
        found.add(name)
    return found


@pytest.fixture(scope="module")
def refused() -> str:
    """The importable names of all other distributions, as JSON."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    base = closure(project["dependencies"])
    names = {
        name
        for name, distributions in metadata.packages_distributions().items()
        if name not in OURS and base.isdisjoint(map(normalized, distributions))
    }
    assert {"torch", "transformers", "redis", "numpy", "pydantic", "cryptography", "starlette"} <= names
    assert {"grpc", "google", "rich"}.isdisjoint(names)
    return json.dumps(sorted(names))


def run(refused: str, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "REFUSED": refused}
    command = [sys.executable, "-c", REFUSE + program, *arguments]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=60)


def test_the_library_loads(refused: str) -> None:
    modules = sorted(path.stem for path in (REPOSITORY / "inflight").glob("*.py"))
    ended = run(refused, f"import {', '.join(f'inflight.{name}' for name in modules)}")
    assert ended.returncode == 0, ended.stderr


def test_every_public_name_is_there(refused: str) -> None:
    assert all(hasattr(inflight, name) for name in inflight.__all__)
    assert dir(inflight) == sorted(inflight.__all__)
    ended = run(refused, "from inflight import *; print(Client.__name__, AsyncClient.__name__)")
    assert (ended.returncode, ended.stdout) == (0, "Client AsyncClient\n"), ended.stderr


def test_the_generated_messages_load_nothing_of_the_client(refused: str) -> None:
    program = "import inflight.v1.inference_pb2; sys.exit(bool({'inflight.aio', 'inflight.sync'} & set(sys.modules)))"
    assert run(refused, program).returncode == 0


@pytest.mark.parametrize("name", BASE)
def test_a_command_for_routers_loads(refused: str, name: str) -> None:
    ended = run(refused, COMMAND, name, "--help")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_generate_runs_up_to_its_connection(refused: str) -> None:
    ended = run(refused, COMMAND, "generate", "--raw", "--address", "127.0.0.1:1", "--timeout", "0.1", "hi")
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
    assert len(ended.stderr.splitlines()) == 1


def test_doctor_says_what_is_missing(refused: str) -> None:
    ended = run(refused, COMMAND, "doctor")
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "pip install 'inflight[serve]'" in ended.stdout


@pytest.mark.parametrize("name", OTHERS)
def test_a_command_without_its_extra_names_it_in_one_line(refused: str, name: str) -> None:
    ended = run(refused, COMMAND, name)
    assert ended.returncode == 2
    assert re.fullmatch(rf"error: inflight {name} needs \w+: pip install 'inflight\[{OTHERS[name]}\]'\n", ended.stderr)
