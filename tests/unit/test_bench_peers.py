"""The catalogue of peers, the start of their processes, and their installation."""

from __future__ import annotations

import ast
import sys
import zipfile
from pathlib import Path

import pytest

from inflight.bench.peers import catalogue, install
from inflight.bench.peers.catalogue import SOURCES, missing_words, parse_peer, peer_environment, preloads, shortcomings
from tests.contract.test_imports import PACKAGES, package_of

DRIVERS = sorted((SOURCES / "bench" / "peers").glob("*.py"))


def test_bare_name_stands_for_the_ways_that_are_compared() -> None:
    assert [peer.mode for peer in parse_peer("vllm")] == ["vllm"]
    assert [peer.mode for peer in parse_peer("vllm:eager")] == ["vllm-eager"]
    assert [peer.command[-1] for peer in parse_peer("vllm:serve")] == ["inflight.bench.peers.vllm_serve_driver"]
    assert [peer.mode for peer in parse_peer("llama")] == ["llama-file", "llama-q4_0"]


def test_peer_runs_in_its_own_environment() -> None:
    (vllm,) = parse_peer("vllm")
    assert vllm.command == (
        str(Path(".peers/vllm/bin/python").absolute()),
        "-P",
        "-m",
        "inflight.bench.peers.vllm_driver",
    )


def test_peer_that_is_not_installed_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (peer,) = parse_peer("vllm")
    assert not peer.is_installed
    assert "make bench-peers" in missing_words(peer)
    (tmp_path / ".peers" / "vllm").mkdir(parents=True)
    (tmp_path / ".peers" / "vllm" / "installed").write_text("")
    assert peer.is_installed


def test_environment_of_a_peer_has_our_sources_and_nothing_else_of_ours() -> None:
    (peer,) = parse_peer("vllm")
    ours = {"PATH": "/bin", "PYTHONPATH": "/ours", "VIRTUAL_ENV": "/v", "INFLIGHT_MODEL": "m", "HOME": "/h"}
    made = peer_environment(peer, ours, [0, 3])
    assert (made["PATH"], made["HOME"], made["PYTHONPATH"]) == ("/bin", "/h", str(SOURCES))
    assert made["OMP_NUM_THREADS"] == "2"
    assert made["VLLM_CPU_OMP_THREADS_BIND"] == "0,3"
    assert made["HF_HUB_OFFLINE"] == "1"
    assert not {"VIRTUAL_ENV", "INFLIGHT_MODEL"} & made.keys()
    assert "VLLM_CPU_OMP_THREADS_BIND" not in peer_environment(parse_peer("llama")[0], ours, [0])


def test_transformers_runs_in_our_own_environment() -> None:
    (peer,) = parse_peer("transformers:static")
    assert peer.is_installed
    assert peer.command[0] == sys.executable
    assert peer_environment(peer, {"PYTHONPATH": "/ours"}, [0])["PYTHONPATH"] == "/ours"


def test_libraries_are_preloaded_as_far_as_they_are_there(tmp_path: Path) -> None:
    libraries, environment = tmp_path / "lib64", tmp_path / "vllm"
    assert preloads(environment, [libraries]) == []
    for path in (libraries / catalogue.TCMALLOC, environment / "lib" / "libiomp5.so"):
        path.parent.mkdir(parents=True)
        path.touch()
    assert [path.name for path in preloads(environment, [libraries])] == [catalogue.TCMALLOC, "libiomp5.so"]
    own = environment / "lib" / catalogue.TCMALLOC
    own.touch()
    assert preloads(environment, [libraries]) == [libraries / catalogue.TCMALLOC, environment / "lib" / "libiomp5.so"]
    assert preloads(environment, [tmp_path / "empty"]) == [own, environment / "lib" / "libiomp5.so"]


def test_missing_allocator_is_said_of_vllm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "preloads", lambda folder: [])
    assert "tcmalloc" in shortcomings(parse_peer("vllm")[0])["allocator"]
    assert shortcomings(parse_peer("llama")[0]) == {}


@pytest.mark.parametrize("path", DRIVERS, ids=lambda path: path.stem)
def test_drivers_import_nothing_of_ours_but_the_protocol(path: Path) -> None:
    """They run where nothing else of the project is installed."""
    imported = {
        node.module
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module is not None
    }
    ours = {name for name in imported if package_of(name) in PACKAGES}
    assert ours <= {"inflight.bench.peers.driver"}


def test_requirements_of_a_wheel_come_without_extras_and_what_is_left_out(tmp_path: Path) -> None:
    wheel = tmp_path / "x-1-py3-none-any.whl"
    lines = [
        "numpy>=2",
        "torch==2.13.0+cpu; platform_machine == 'x86_64'",
        'scipy; extra == "audio"',
        "fast_api[all]<1",
    ]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x-1.dist-info/METADATA", "".join(f"Requires-Dist: {line}\n" for line in lines) + "\n")
    assert install.wanted_requirements(wheel, ("torch",)) == ["numpy>=2", "fast_api[all]<1"]


def test_installed_version_is_left_alone_and_another_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    installed: list[str] = []
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    for versions in ("1", "1", "2"):
        recipe = install.Recipe("a peer", versions, "import sys", lambda python: installed.append(str(python)))
        install.install(tmp_path, recipe)
    assert installed == [str(python)] * 2
    assert "is complete" in capsys.readouterr().out


def test_environment_that_cannot_import_the_peer_is_not_complete(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    with pytest.raises(install.InstallError, match="no_such_engine"):
        install.install(tmp_path, install.Recipe("a peer", "1", "import no_such_engine", lambda python: None))
    assert not (tmp_path / install.MARK).exists()


def test_failed_installation_is_reported_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise install.InstallError("no matching distribution")

    monkeypatch.setattr(install, "install", fail)
    assert install.main() == 1
    said = capsys.readouterr().err
    assert "vLLM cannot be installed here: no matching distribution" in said
    assert "llama.cpp cannot be installed here: no matching distribution" in said
