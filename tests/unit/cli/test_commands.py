"""The table of commands, and which router a command asks."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inflight.cli import main as cli
from inflight.cli.flags import DEFAULT_ADDRESS, add_address_flags, resolve_addresses
from inflight.cli.main import COMMANDS, Command, main, usage
from inflight.local.state import ProcessState, StackState, write_state
from tests.unit.scripted_router import ScriptedRouter

NATIVE = [command.name for command in COMMANDS if command.run.startswith("inflight.")]


@pytest.mark.parametrize("name", NATIVE)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: inflight {name}")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(f"  {command.name}" in output for command in COMMANDS)
    assert output.strip() == usage()


def test_no_command_and_a_wrong_one_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["genrate"]) == 2
    assert "unknown command 'genrate'" in capsys.readouterr().err


def test_a_wrong_flag_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["models", "--colour"])
    assert ended.value.code == 2


def test_a_command_whose_extra_is_not_installed_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "COMMANDS", (Command("fly", "fly", "nowhere.main:main", "wings"),))
    assert main(["fly"]) == 2
    assert capsys.readouterr().err == "error: inflight fly needs nowhere: pip install 'inflight[wings]'\n"


@pytest.mark.parametrize("words", [["--help"], ["executor", "--batching", "dynamic"]])
def test_help_and_refused_settings_load_no_server_and_no_model_library(words: list[str]) -> None:
    program = (
        f"import sys; from inflight.cli.main import main; main({words});"
        "servers = {'torch', 'transformers', 'redis', 'inflight.router.main', 'inflight.executor.main'};"
        "sys.exit(bool(servers & set(sys.modules)))"
    )
    folder = Path(cli.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, stdout=subprocess.DEVNULL, timeout=60)


def test_command_sets_the_environment_of_grpc_before_it_is_loaded() -> None:
    """gRPC reads GRPC_VERBOSITY when it is imported."""
    program = "import sys, inflight.cli.main; sys.exit('grpc' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=Path(cli.__file__).parents[2])


# --- the address


def address_of(*flags: str) -> str:
    return ",".join(resolve_addresses(parse_address(flags), os.environ))


def parse_address(flags: tuple[str, ...]) -> Any:
    parser = argparse.ArgumentParser()
    add_address_flags(parser)
    return parser.parse_args(flags)


def test_the_address_is_flag_then_environment_then_running_stack_then_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert address_of() == DEFAULT_ADDRESS
    (tmp_path / "run").mkdir()
    write_state(tmp_path / "run", StackState(os.getpid(), "127.0.0.1:7", "redis://x", ()))
    assert address_of() == "127.0.0.1:7"
    monkeypatch.setenv("INFLIGHT_ADDRESS", "there:8")
    assert address_of() == "there:8"
    assert address_of("--address", "here:9") == "here:9"


def test_several_routers_share_the_calls(
    address: str, router: ScriptedRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parse_address(("--address", "a:1,b:2")).address == address_of("--address", "a:1,b:2") == "a:1,b:2"
    (tmp_path / "run").mkdir()
    dead, executor = (ProcessState(f"{role}-1", role, 1, "127.0.0.1:1", "log") for role in ("router", "executor"))
    write_state(tmp_path / "run", StackState(os.getpid(), address, "redis://x", (executor, dead)))
    assert address_of() == f"{address},127.0.0.1:1"
    for _ in range(3):
        assert main(["generate", "hi", "--raw"]) == 0


def test_the_run_folder_is_flag_then_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_state(tmp_path / name, StackState(os.getpid(), f"{name}:1", "redis://x", ()))
    monkeypatch.setenv("INFLIGHT_RUN_DIR", "a")
    assert address_of() == "a:1"
    assert address_of("--run-dir", "b") == "b:1"


def test_a_broken_state_file_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for content in ("", "{", "[]", '{"pid": 1}'):
        (tmp_path / "run" / "state.json").write_text(content)
        assert address_of() == DEFAULT_ADDRESS
