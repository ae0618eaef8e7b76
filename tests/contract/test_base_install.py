"""The packages of an installation: the client library and its commands need only the dependencies without extras, the
gateway its extra, and the commands of the router image what that image installs.

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
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
# Runs several in one process: a package that is refused to one is refused to all.
COMMANDS_IN_TURN = """
import contextlib, io
from inflight.cli.main import main

results = {}
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = ended.code
    results[arguments[0]] = code, out.getvalue(), err.getvalue()
print(json.dumps(results))
"""


def closure(requirements: list[str]) -> set[str]:
    """The distributions that these requirements bring, without those of another platform or Python."""
    found: set[str] = set()
    waiting = [(Requirement(requirement), "") for requirement in requirements]
    while waiting:
        requirement, of_extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": of_extra}):
            continue
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (key := f"{name}[{extra}]") not in found:
                found.add(key)
                waiting += [(Requirement(needed), extra) for needed in metadata.requires(name) or ()]
    return {key.partition("[")[0] for key in found}


def refused_by(requirements: list[str]) -> str:
    """The importable names of all other distributions, as JSON."""
    allowed = closure(requirements)
    return json.dumps(
        sorted(
            name
            for name, distributions in metadata.packages_distributions().items()
            if name not in OURS and allowed.isdisjoint(map(canonicalize_name, distributions))
        )
    )


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """The table `project` of pyproject.toml."""
    read: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return read


@pytest.fixture(scope="module")
def refused(project: dict[str, Any]) -> str:
    """What the base installation does not have."""
    names = refused_by(project["dependencies"])
    not_there = set(json.loads(names))
    assert {"torch", "transformers", "redis", "numpy", "pydantic", "cryptography", "starlette"} <= not_there
    assert {"grpc", "google", "rich"}.isdisjoint(not_there)
    return names


def run(refused: str, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "REFUSED": refused}
    command = [sys.executable, "-c", REFUSE + program, *arguments]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=60)


def run_in_turn(refused: str, commands: list[list[str]]) -> dict[str, tuple[int, str, str]]:
    """The exit code, output and errors of each command, by its name."""
    ended = run(refused, COMMANDS_IN_TURN, json.dumps(commands))
    assert ended.returncode == 0, ended.stderr
    results: dict[str, tuple[int, str, str]] = json.loads(ended.stdout)
    return results


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


def test_commands_for_routers_load(refused: str) -> None:
    for name, (code, out, err) in run_in_turn(refused, [[name, "--help"] for name in BASE]).items():
        assert (code, err) == (0, ""), name
        assert out.startswith(f"usage: inflight {name}")


def test_generate_runs_up_to_its_connection(refused: str) -> None:
    ended = run(refused, COMMAND, "generate", "--raw", "--address", "127.0.0.1:1", "--timeout", "0.1", "hi")
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
    assert len(ended.stderr.splitlines()) == 1


def test_doctor_says_what_is_missing(refused: str) -> None:
    ended = run(refused, COMMAND, "doctor")
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "pip install 'inflight[serve]'" in ended.stdout


def test_a_command_without_its_extra_names_it_in_one_line(refused: str) -> None:
    for name, (code, out, err) in run_in_turn(refused, [[name] for name in OTHERS]).items():
        assert (code, out) == (2, ""), name
        assert re.fullmatch(rf"error: inflight {name} needs \w+: pip install 'inflight\[{OTHERS[name]}\]'\n", err)


def test_the_gateway_loads_with_its_extra(project: dict[str, Any]) -> None:
    refused = refused_by([*project["dependencies"], *project["optional-dependencies"]["gateway"]])
    assert "torch" in refused
    assert run(refused, COMMAND, "gateway", "--help").returncode == 0


def test_commands_of_the_router_image_load_without_torch() -> None:
    lines = (REPOSITORY / "deploy" / "requirements-front.txt").read_text().splitlines()
    refused = refused_by([line for line in lines if not line.startswith("#")])
    assert "torch" in refused
    names = ("router", "gateway", "pod-costs", "certs", "kube-secrets")
    for name, (code, _, err) in run_in_turn(refused, [[name, "--help"] for name in names]).items():
        assert code == 0, f"{name}: {err}"
