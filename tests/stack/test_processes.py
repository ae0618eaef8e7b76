"""Processes as an operator sees them: errors at start name the reason, and a killed stack leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import grpc
import pytest

from inflight import AsyncClient
from inflight.common.model_source import ModelError
from inflight.errors import InflightError
from inflight.events import Delta
from inflight.executor.loader import load_executor
from inflight.executor.settings import ExecutorSettings

PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def run_inflight(*arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "inflight.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=environment)


def write_model(folder: Path, config: dict[str, object]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def bad_models(folder: Path) -> dict[str, str]:
    (folder / "short.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    unsupported = write_model(folder / "mamba", {"model_type": "mamba", "architectures": ["MambaForCausalLM"]})
    truncated = write_model(folder / "llama", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    (truncated / "model.safetensors").write_bytes(b"\x10")
    return {
        "missing": str(folder / "nowhere"),
        "truncated": str(truncated),
        "truncated gguf": str(folder / "short.gguf"),
        "unsupported": str(unsupported),
    }


@pytest.mark.parametrize("what", ["missing", "truncated", "truncated gguf", "unsupported"])
def test_model_that_cannot_be_used_is_named(tmp_path: Path, what: str) -> None:
    path = bad_models(tmp_path)[what]
    with pytest.raises(ModelError, match=Path(path).name):
        load_executor(ExecutorSettings(model=path, device="cpu", insecure=True))


def test_process_whose_model_cannot_be_used_says_so_in_one_line(tmp_path: Path) -> None:
    path = bad_models(tmp_path)["truncated"]
    ended = run_inflight("executor", "--insecure", "--listen", "127.0.0.1:0", "--model", path)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert Path(path).name in line


def test_port_in_use_is_said_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for role in (("executor", "--insecure"), ("router",)):
            ended = run_inflight(*role, "--listen", address)
            assert ended.returncode == 3, ended.stderr
            assert f"error: cannot listen on {address}" in ended.stderr
            assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("executor", "--batching", "dynamic"), ("batching", "inflight", "static")),
        (("router", "--redis-url", "http://somewhere"), ("redis-url", "redis://", "unix://")),
    ],
)
def test_bad_setting_is_named_with_what_is_allowed(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    ended = run_inflight(*arguments)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert all(word in ended.stderr for word in words), ended.stderr


async def stream_to_end(deltas: AsyncIterator[Delta]) -> None:
    """Reads what is left of a stream."""
    async for _ in deltas:
        pass


def children_of(pids: list[int]) -> list[int]:
    """Those of the processes that still live."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def test_stack_killed_in_the_middle_of_a_stream_gives_a_status_and_leaves_no_process(tmp_path: Path) -> None:
    # Given a stack of its own process, as `inflight up` runs it, and a stream through it
    command = [sys.executable, "-m", "inflight.cli.main", "up", "--run-dir", str(tmp_path)]
    up = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL, cwd=Path.cwd())
    state_file = tmp_path / "state.json"
    async with asyncio.timeout(240):
        while not state_file.exists():
            assert up.returncode is None
            await asyncio.sleep(0.05)
    state = json.loads(state_file.read_text())
    pids = [process["pid"] for process in state["processes"]]
    assert len(pids) == 3
    async with AsyncClient(state["address"], retries=False, resume_timeout=2.0) as client:
        stream = client.generate("Once upon a time", max_tokens=2000, ignore_eos=True)
        deltas = aiter(stream)
        await anext(deltas)
        # When everything is killed at once
        for pid in [*pids, up.pid]:
            os.kill(pid, signal.SIGKILL)
        # Then the client is told, and nothing is left
        with pytest.raises(InflightError) as error:
            await asyncio.wait_for(stream_to_end(deltas), 60)
    assert error.value.code is grpc.StatusCode.UNAVAILABLE
    await up.wait()
    async with asyncio.timeout(60):
        while children_of(pids):
            await asyncio.sleep(0.05)


async def test_stack_starts_and_answers_with_an_unreachable_proxy_in_the_environment(
    tmp_path: Path, tiny_model: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
    environment |= dict.fromkeys(PROXIES, "http://127.0.0.1:1")
    command = [sys.executable, "-m", "inflight.cli.main", "up", "--run-dir", str(tmp_path), "--model", str(tiny_model)]
    up = await asyncio.create_subprocess_exec(
        *command, "--gateway", stdout=asyncio.subprocess.DEVNULL, cwd=Path.cwd(), env=environment
    )
    try:
        async with asyncio.timeout(240):
            while not (tmp_path / "state.json").exists():
                assert up.returncode is None
                await asyncio.sleep(0.05)
        generated = await asyncio.to_thread(
            run_inflight, "generate", "--run-dir", str(tmp_path), "--max-tokens", "4", "Once", environment=environment
        )
        assert generated.returncode == 0, generated.stderr
        processes = json.loads((tmp_path / "state.json").read_text())["processes"]
        (gateway,) = [process["address"] for process in processes if process["role"] == "gateway"]
        assert [model["object"] for model in await asyncio.to_thread(models_at, gateway)] == ["model"]
    finally:
        up.terminate()
        assert await asyncio.wait_for(up.wait(), 60) == 0


def models_at(gateway: str) -> list[dict[str, object]]:
    """Lists the models as a client of OpenAI does, without a proxy of its own."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{gateway}/v1/models", timeout=60) as response:
        models: list[dict[str, object]] = json.load(response)["data"]
    return models
