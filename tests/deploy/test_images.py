"""The Dockerfile and the compose file: what they copy, run and set is there. Nothing is built, and no daemon asked."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from client.cli.main import COMMANDS
from client.stack.redis_server import ACL_RULES, USER
from common.settings import ENV_PREFIX
from tests.deploy.test_manifests import SETTINGS

REPOSITORY = Path(__file__).parents[2]
DOCKERFILE = REPOSITORY / "deploy" / "Dockerfile"
TARGETS = ("router", "gateway", "executor-cpu", "executor-cuda", "models")
REDIS_PASSWORD = "${REDIS_PASSWORD}"

Instruction = tuple[str, str]


def stages() -> dict[str, list[Instruction]]:
    """The instructions of every stage, by its name."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE))
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            current = found[rest.split()[2]] = []
        current.append((word, rest))
    return found


def all_of(name: str) -> list[Instruction]:
    """A stage's instructions, after those of the stages that it builds on."""
    own = stages()[name]
    base = own[0][1].split()[0]
    return [*(all_of(base) if base in stages() else []), *own]


def test_what_is_copied_is_there_and_not_kept_out() -> None:
    ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    let_in = {line[1:] for line in ignored if line.startswith("!")}
    for name, instructions in stages().items():
        for word, rest in instructions:
            if word != "COPY":
                continue
            *sources, _ = [part for part in shlex.split(rest) if not part.startswith("--")]
            if "--from=" in rest:
                assert rest.partition("--from=")[2].split()[0] in stages(), name
                continue
            for source in sources:
                assert (REPOSITORY / source).exists(), source
                assert source in let_in, source
    assert all((REPOSITORY / path).exists() for path in let_in)


def test_the_wheel_has_all_packages() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    copied = {rest.split()[0] for word, rest in stages()["wheel"] if word == "COPY"}
    assert {package.partition("/")[0] for package in packages} <= copied


@pytest.mark.parametrize("name", TARGETS)
def test_image_runs_as_nobody_in_particular_on_a_pinned_base(name: str) -> None:
    instructions = all_of(name)
    users = [rest for word, rest in instructions if word == "USER"]
    assert users[-1] == "10001:10001"
    (base,) = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", DOCKERFILE.read_text(), flags=re.MULTILINE)
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+(@sha256:[0-9a-f]{64})?", base)
    roots = [stage[0][1].split()[0] for stage in stages().values()]
    assert set(roots) <= {"${PYTHON_IMAGE}", *stages()}
    labels = " ".join(rest for word, rest in instructions if word == "LABEL")
    assert "org.opencontainers.image.version" in labels


@pytest.mark.parametrize("name", [target for target in TARGETS if target != "models"])
def test_image_starts_and_checks_a_command_that_there_is(name: str) -> None:
    instructions = all_of(name)
    commands = {command.name for command in COMMANDS}
    (started,) = (yaml.safe_load(rest) for word, rest in instructions if word == "CMD")
    assert started[0] == "inflight"
    assert started[1] == name.partition("-")[0] in commands
    (check,) = (rest for word, rest in instructions if word == "HEALTHCHECK")
    words = yaml.safe_load(check.partition("CMD ")[2])
    assert words[:2] == ["inflight", "healthcheck"]
    assert "healthcheck" in commands


def test_packages_have_the_versions_of_the_constraints() -> None:
    for instructions in stages().values():
        for word, rest in instructions:
            if word == "RUN" and "pip install" in rest:
                for command in rest.split("&&"):
                    pinned = "--constraint" in command or command.strip().endswith("--no-deps /wheels/*.whl")
                    assert pinned or "pip install" not in command, command


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[><=\[;]", line)[0].strip().lower().replace("_", "-") for line in requirements}


def test_routers_packages_are_ours_less_what_computes() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = (REPOSITORY / "deploy" / "requirements-front.txt").read_text().splitlines()
    front = names_of([line for line in lines if not line.startswith("#")])
    every = names_of([*project["dependencies"], *project["optional-dependencies"]["otel"]])
    assert every - front == {"torch", "accelerate", "gguf"}
    assert front <= every
    pinned = names_of([line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if "==" in line])
    assert front <= pinned


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The compose file."""
    loaded: dict[str, Any] = yaml.safe_load((REPOSITORY / "deploy" / "compose.yaml").read_text())
    return loaded


def filled(value: str) -> str:
    """Variables at their defaults."""
    return re.sub(r"\$\{\w+(?::-([^}]*)|:\?[^}]*)?\}", lambda found: found[1] or "x", value)


@pytest.mark.parametrize("name", SETTINGS)
def test_variables_in_compose_are_settings_of_the_process(compose: dict[str, Any], name: str) -> None:
    environment = compose["services"][name]["environment"]
    fields = {key.removeprefix(ENV_PREFIX).lower(): filled(str(value)) for key, value in environment.items()}
    SETTINGS[name].model_validate(fields)


def test_services_of_compose_are_hardened_pinned_and_lead_somewhere(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"]
        assert re.search(r":v?\d+\.\d+\.\d+[\w.-]*$", service["image"]), name
        if "build" in service:
            assert service["build"]["target"] in TARGETS
        for other in service.get("depends_on", ()):
            assert other in compose["services"]
        for network in service.get("networks", ()):
            assert network in compose["networks"]
        for source in service.get("configs", ()):
            assert source["source"] in compose["configs"]
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")


def test_only_routers_reach_executors_and_redis_in_compose(compose: dict[str, Any]) -> None:
    def on(network: str) -> set[str]:
        return {name for name, service in compose["services"].items() if network in service.get("networks", ())}

    assert on("links") == {"executor", "router", "prometheus"}
    assert on("ledger") == {"redis", "router"}
    for network in ("links", "ledger"):
        assert compose["networks"][network]["internal"] is True


def test_redis_of_compose_lets_routers_do_what_they_need_and_no_more(compose: dict[str, Any]) -> None:
    users = compose["configs"]["redis-users"]["content"].splitlines()
    assert users == ["user default off", f"user {USER} on >{REDIS_PASSWORD} {ACL_RULES}"]
