"""`inflight up` and `inflight demo`: the command lines that their flags become."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
from pathlib import Path

import pytest

from inflight.cli.console import CommandError
from inflight.cli.main import main
from inflight.cli.up import _parser as up_parser
from inflight.cli.up import stack_options
from inflight.local.gpus import devices_of
from inflight.local.options import StackOptions, executor_command, gateway_command, router_command
from inflight.local.stack import LocalStack, StackError


def test_up_turns_its_flags_into_the_servers_flags() -> None:
    flags = ["--executors", "2", "--model", "m", "--port", "5000", "--batching", "static", "--max-num-sequences", "4"]
    options = stack_options(up_parser().parse_args([*flags, "--executor-args", "--num-threads 1"]))
    assert (options.executors, options.routers, options.port) == (2, 1, 5000)
    command = executor_command(options, "executor-0", "127.0.0.1:1")
    assert command[: len(options.program) + 3] == [*options.program, "executor", "--listen", "127.0.0.1:1"]
    # The user's come last, so that they win over what the stack chooses.
    assert command[-8:] == [*("--model", "m", "--batching", "static", "--max-num-sequences", "4", "--num-threads", "1")]
    command = router_command(options, "router-0", "127.0.0.1:2", ("127.0.0.1:1", "127.0.0.1:3"))
    assert command[command.index("--executors") + 1] == "127.0.0.1:1,127.0.0.1:3"


def test_modules_in_the_current_folder_are_not_those_of_a_child_process(tmp_path: Path) -> None:
    for name in ("common", "grpc", "inflight", "router", "typing"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')\n")
    command = [*StackOptions().program, "executor", "--help"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.stdout.startswith("usage: inflight executor"), ended.stderr


def test_up_passes_the_routers_flags_on() -> None:
    flags = ["--admission-file", "a.toml", "--max-queue-requests", "7", "--router-args", "--age-s 5"]
    options = stack_options(up_parser().parse_args(flags))
    command = router_command(options, "router-0", "127.0.0.1:2", ("127.0.0.1:1",))
    assert command[-6:] == [*("--admission-file", "a.toml", "--max-queue-requests", "7", "--age-s", "5")]


def test_up_starts_executors_around_vllm_by_its_python(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    flags = ["--model", str(tmp_path), "--engine", "vllm", "--engine-python", "/opt/vllm/bin/python"]
    options = stack_options(up_parser().parse_args([*flags, "--engine-args", "--max-model-len 64"]))
    command = executor_command(options, "executor-0", "127.0.0.1:1")
    assert command[:5] == ["/opt/vllm/bin/python", "-P", "-m", "inflight.cli.main", "executor"]
    assert command[-5:] == ["--model", str(tmp_path), "--engine", "vllm", "--engine-args=--max-model-len 64"]
    assert router_command(options, "router-0", "127.0.0.1:2", ())[0] == options.program[0]


def test_vllm_gets_a_folder_of_a_gguf_file_and_the_routers_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.executor.checkpoint.gguf.import_gguf", lambda source: Path("/cache/folder"))
    options = stack_options(up_parser().parse_args(["--engine", "vllm"]))
    command = executor_command(options, "executor-0", "127.0.0.1:1")
    assert command[-6:-2] == ["--model", "/cache/folder", "--served-model-name", "SmolLM2-135M-Instruct"]
    assert "--model" not in router_command(options, "router-0", "127.0.0.1:2", ())


def test_flags_of_an_engine_need_the_engine() -> None:
    with pytest.raises(CommandError, match="--engine vllm"):
        stack_options(up_parser().parse_args(["--engine-args", "--enforce-eager"]))


@pytest.mark.parametrize(
    ("flags", "gateways", "port"),
    [("", 0, None), ("--gateway", 1, 8000), ("--gateway-port 0", 1, None), ("--gateway --gateway-port 9000", 1, 9000)],
)
def test_up_starts_a_gateway_where_it_is_asked_for(flags: str, gateways: int, port: int | None) -> None:
    options = stack_options(up_parser().parse_args(flags.split()))
    assert (options.gateways, options.gateway_port) == (gateways, port)


def test_up_passes_the_gateways_flags_and_the_routers_on() -> None:
    options = stack_options(up_parser().parse_args(["--gateway", "--gateway-args", "--max-body-bytes 4096", "--tls"]))
    command = gateway_command(options, "127.0.0.1:8000", ("127.0.0.1:1", "127.0.0.1:2"))
    assert command[len(options.program) : -2] == [
        *("gateway", "--listen", "127.0.0.1:8000", "--routers", "127.0.0.1:1,127.0.0.1:2", "--drain-timeout-s", "5.0"),
        *("--router-tls-ca-file", "run/certificates/ca.pem", "--router-tls-name", "inflight-router"),
    ]
    assert command[-2:] == ["--max-body-bytes", "4096"]


@pytest.mark.parametrize("role", ["executor", "router", "gateway"])
def test_up_passes_one_flag_without_a_value_on(role: str) -> None:
    options = stack_options(up_parser().parse_args(["--routers", "2", f"--{role}-args", "--insecure"]))
    assert (options.routers, getattr(options, f"{role}_args")) == (2, ("--insecure",))


def test_up_takes_an_empty_model_as_the_default() -> None:
    options = stack_options(up_parser().parse_args(["--model", ""]))
    assert "--model" not in router_command(options, "router-0", "127.0.0.1:2", ("127.0.0.1:1",))


def test_up_names_the_flag_whose_quotation_is_open(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--router-args", "--router-id 'a"]) == 2
    assert capsys.readouterr().err == "error: --router-args: No closing quotation\n"


def test_up_refuses_one_port_for_two_servers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--port", "5000", "--gateway-port", "8000", "--http-port", "5000"]) == 2
    assert capsys.readouterr().err == "error: port and http_port are both 5000; each needs a port of its own\n"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--executors 0", "executors"),
        ("--routers -1", "routers"),
        ("--port 0", "port"),
        ("--http-port 70000", "http_port"),
        ("--gateway-port -1", "gateway_port"),
    ],
)
def test_up_refuses_a_bad_number_by_name(flags: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", *flags.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {named} must be")


def test_demo_refuses_a_bad_number_of_seats(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--seats", "0"]) == 2
    assert "--seats" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("executors", "arguments", "num_gpus", "devices"),
    [
        (3, "", 4, [0, 1, 2]),
        (2, "--tensor-parallel-size 2", 4, [0, 2]),
        (1, "", 4, [None]),
        (2, "", 0, [None, None]),
        (4, "--device cpu", 2, [None] * 4),
        (2, "--device-index 0", 1, [None, None]),  # they share it, as the user says
    ],
)
def test_each_executor_has_gpus_of_its_own(
    executors: int, arguments: str, num_gpus: int, devices: list[int | None]
) -> None:
    options = StackOptions(executors=executors, executor_args=tuple(arguments.split()))
    assert devices_of(options, num_gpus) == devices
    command = executor_command(options, "executor", "127.0.0.1:1", device_index=devices[-1])
    chosen = [command[i + 1] for i, word in enumerate(command) if word == "--device-index"]
    assert chosen == ([str(devices[-1])] if devices[-1] is not None else ["0"] if "--device-index" in arguments else [])


@pytest.mark.parametrize(
    ("flags", "gpus", "routers"),
    [
        ("", 0, 1),
        ("--executors 3", 0, 1),
        ("", 8, 1),
        ("--executors 3", 8, 3),
        ("--executors 2 --executor-args='--device-index 0'", 1, 1),
        ("--executors 3 --routers 2", 8, 2),
    ],
)
def test_each_executor_with_a_gpu_has_a_router(
    flags: str, gpus: int, routers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inflight.cli.up.num_gpus", lambda: gpus)
    assert stack_options(up_parser().parse_args(shlex.split(flags))).routers == routers


def test_more_executors_than_gpus_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("inflight.local.stack.num_gpus", lambda: 3)
    options = StackOptions(executors=2, executor_args=("--tensor-parallel-size", "2"), run_dir=tmp_path)
    with pytest.raises(
        StackError, match=r"tensor_parallel_size=2 need 4 GPUs, and CUDA shows 3; start 1, or give"
    ) as at:
        asyncio.run(LocalStack(options).start())
    assert at.value.is_setting
