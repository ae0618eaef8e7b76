"""The distributions of a release: built from this working copy, installed into an empty environment, named alike."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
VERSION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
# Builds from sources in its working folder into the folder that it is given.
BUILD = """
import sys
from hatchling import build
getattr(build, f"build_{sys.argv[1]}")(sys.argv[2])
"""


def environment(folder: Path, *packages: str) -> Path:
    """The Python of a new environment with these packages; the test is skipped where an index cannot be reached."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    python = folder / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    if ended.returncode:
        assert re.search(r"connection|resolve|from versions: none|HTTP error", ended.stderr, re.IGNORECASE), (
            ended.stderr
        )
        pytest.skip(f"packages cannot be installed: {ended.stderr.strip()[-300:]}")
    return python


def in_wheel(path: Path) -> dict[str, bytes]:
    """What a wheel has, less the list of it."""
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/RECORD")}


@pytest.mark.slow
@pytest.mark.timeout(1200)  # two environments are made, and packages installed
def test_release_is_built_and_runs_in_an_empty_environment(tmp_path: Path) -> None:
    # When a source distribution and a wheel are built, and a wheel of the source distribution
    locked = ("--require-hashes", "--requirement", "deploy/locks/build.txt")
    builder = environment(tmp_path / "builder", *locked)
    made = tmp_path / "dist"
    for kind in ("sdist", "wheel"):
        subprocess.run([builder, "-c", BUILD, kind, str(made)], cwd=REPOSITORY, check=True, timeout=120)
    (source,), (wheel,) = made.glob("*.tar.gz"), made.glob("*.whl")
    with tarfile.open(source) as tar:
        tar.extractall(tmp_path / "source", filter="data")
    unpacked = tmp_path / "source" / f"inflight-{VERSION}"
    subprocess.run([builder, "-c", BUILD, "wheel", str(tmp_path)], cwd=unpacked, check=True, timeout=120)
    # Then both wheels have the same files, and nothing of the tests
    assert wheel.name == f"inflight-{VERSION}-py3-none-any.whl"
    assert in_wheel(tmp_path / wheel.name) == in_wheel(wheel)
    folders = {name.partition("/")[0] for name in in_wheel(wheel)}
    assert folders == {"inflight", f"inflight-{VERSION}.dist-info"}
    # And with its dependencies alone, which are those of a client, it runs
    python = environment(tmp_path / "empty", "--constraint", "constraints.txt", str(wheel))
    command = python.with_name("inflight")
    said = subprocess.run([command, "--version"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout == f"inflight {VERSION}\n"
    # Also beside modules of the user that have the names of its folders
    for name in ("bench", "common", "executor", "gateway", "router"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')\n")
    program = "import inflight; print(inflight.AsyncClient, inflight.__file__)"
    said = subprocess.run([python, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert str(tmp_path / "empty") in said.stdout
    subprocess.run([python, "-m", "pip", "check"], check=True, timeout=60)


def test_images_and_pages_have_the_version_of_the_package() -> None:
    labels = re.findall(r'image\.version="([^"]+)"', (REPOSITORY / "deploy" / "Dockerfile").read_text())
    assert set(labels) == {VERSION}
    services = yaml.safe_load((REPOSITORY / "deploy" / "compose.yaml").read_text())["services"].values()
    ours = {service["image"].partition(":")[2] for service in services if "build" in service}
    assert ours == {VERSION}
    for page in ("docs/images.md", "docs/kubernetes.md"):
        text = (REPOSITORY / page).read_text()
        named = re.findall(r"(?:inflight/[a-z$-]+:|inflight-|--version )(\d+\.\d+\.\d+)", text)
        assert set(named) == {VERSION}, page


def test_changelog_has_a_part_for_what_is_not_released() -> None:
    heads = re.findall(r"^## \[(.+?)\]", (REPOSITORY / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert heads[0] == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", head) for head in heads[1:])
    assert heads[1:] == sorted(heads[1:], key=lambda head: [int(part) for part in head.split(".")], reverse=True)
    assert VERSION in heads[1:] or len(heads) == 1
