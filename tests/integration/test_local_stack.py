"""The local stack, real Redis, stand-ins for the servers: it comes up whole or not at all, and leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from inflight.common.guard import guarded
from inflight.local.options import StackOptions
from inflight.local.ports import free_ports
from inflight.local.process import ChildProcess
from inflight.local.stack import LocalStack, Phase, Progress, StackError
from inflight.local.state import read_state

FAKE_SERVER = Path(__file__).with_name("fake_server.py")
WAIT_S = 60.0

# Starts a stack of stand-ins in a process of its own, in the way that `inflight up` does.
UP = """
import sys
from pathlib import Path
from inflight.cli.console import run_in_foreground
from inflight.cli.up import _up
from inflight.local.options import StackOptions
program, run_dir = (sys.executable, sys.argv[1]), Path(sys.argv[2])
sys.exit(run_in_foreground(lambda: _up(StackOptions(program=program, run_dir=run_dir))))
"""

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="waits for other processes through pidfd")


def options(run_dir: Path, behave: str = "serve", **changes: Any) -> StackOptions:
    values: dict[str, Any] = {
        "program": (sys.executable, str(FAKE_SERVER)),
        "run_dir": run_dir,
        "executor_args": ("--behave", behave),
        **changes,
    }
    return StackOptions(**values)


def start_up(run_dir: Path) -> subprocess.Popen[str]:
    """`inflight up` in a process of its own; returns when it has greeted."""
    command = [sys.executable, "-c", UP, str(FAKE_SERVER), str(run_dir)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("Ready: "):
            return process
    raise AssertionError("the stack did not come up")


def pids_of(run_dir: Path) -> list[int]:
    state = read_state(run_dir)
    assert state is not None
    return [process.pid for process in state.processes]


def all_end(pids: Iterable[int]) -> bool:
    """Whether every one of these processes ends in time, our children or not."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([descriptor], [], [], WAIT_S)[0]:
                return False
        finally:
            os.close(descriptor)
    return True


def has_text(file: str) -> bool:
    return Path(file).stat().st_size > 0


def about(pid: int, what: str) -> str:
    return Path(f"/proc/{pid}/{what}").read_text()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_stack_comes_up_writes_its_state_and_leaves_nothing(tmp_path: Path) -> None:
    news: list[Progress] = []
    async with LocalStack(options(tmp_path, executors=2, routers=2), news.append) as stack:
        state = read_state(tmp_path)
        assert state is not None
        assert [process.name for process in state.processes] == [
            "redis", "executor-0", "executor-1", "router-0", "router-1",
        ]  # fmt: skip
        assert state.address == stack.address == stack.router_addresses[0]
        assert state.pid == os.getpid()
        assert all(has_text(process.log_file) for process in state.processes)
        assert not any(is_gone(process.pid) for process in state.processes)
        assert len({process.address for process in state.processes}) == 5
    assert all(is_gone(process.pid) for process in state.processes)
    assert not (tmp_path / "state.json").exists()
    ready = [progress.name for progress in news if progress.phase is Phase.READY]
    assert sorted(ready) == sorted(process.name for process in state.processes)


async def test_stack_comes_up_on_ipv6(tmp_path: Path) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    async with LocalStack(options(tmp_path, host="[::1]", gateways=1)) as stack:
        assert stack.address.startswith("[::1]:")


async def test_gateways_are_started_shown_and_ended_like_everything_else(tmp_path: Path) -> None:
    async with LocalStack(options(tmp_path, gateways=2)) as stack:
        state = read_state(tmp_path)
        assert state is not None
        by_name = {process.name: process for process in state.processes}
        assert [name for name in by_name if name.startswith("gateway")] == ["gateway-0", "gateway-1"]
        assert stack.gateway_addresses == (by_name["gateway-0"].address, by_name["gateway-1"].address)
        assert not any(is_gone(process.pid) for process in state.processes)
        # What speaks HTTP is told where; Redis does not.
        assert [process.http_address for process in state.processes].count("") == 1
        assert "--http-listen\0" + by_name["router-0"].http_address in about(by_name["router-0"].pid, "cmdline")
        assert "--http-listen\0" + by_name["executor-0"].http_address in about(by_name["executor-0"].pid, "cmdline")
        # The stack's Redis keeps stored responses. Its password is in no command line.
        assert f"INFLIGHT_STORE_URL={stack.redis_url}" in about(by_name["gateway-0"].pid, "environ")
        assert stack.redis_url not in about(by_name["gateway-0"].pid, "cmdline")
    assert all(is_gone(process.pid) for process in state.processes)


async def test_the_password_of_redis_is_in_no_command_line_and_in_no_readable_file(tmp_path: Path) -> None:
    async with LocalStack(options(tmp_path)) as stack:
        password = stack.redis_url.partition("@")[0].rpartition(":")[2]
        assert len(password) > 16
        for pid in pids_of(tmp_path):
            assert password not in about(pid, "cmdline")
        assert password in about(stack.routers[0].pid, "environ")
        assert stat.S_IMODE((tmp_path / "state.json").stat().st_mode) == 0o600


async def test_a_bad_setting_is_told_in_the_servers_own_words(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"^executor-0: --batching: 'sideways' is not allowed") as caught:
        await LocalStack(options(tmp_path, "bad-setting")).start()
    assert caught.value.is_setting
    assert not (tmp_path / "state.json").exists()


async def test_a_crash_at_the_start_is_told_with_the_end_of_the_log(tmp_path: Path) -> None:
    news: list[Progress] = []
    with pytest.raises(StackError, match="executor-0 ended with code 1 before it was ready") as caught:
        await LocalStack(options(tmp_path, "crash"), news.append).start()
    assert "this machine is too warm" in str(caught.value)
    assert str(tmp_path / "executor-0.log") in str(caught.value)
    stopped = {progress.name for progress in news if progress.phase is Phase.STOPPED}
    assert stopped == {"redis", "executor-0", "router-0"}


async def test_a_server_that_does_not_get_ready_in_time_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"(executor|router)-0 was not ready after 1 s"):
        await LocalStack(options(tmp_path, "never-ready", start_timeout_s=1.0)).start()


async def test_a_port_that_was_taken_meanwhile_is_replaced_by_another(tmp_path: Path) -> None:
    marker = tmp_path / "taken"
    marker.touch()
    async with LocalStack(options(tmp_path, f"port-taken={marker}")) as stack:
        assert len(stack.executors) == 1
    assert not marker.exists()


async def test_answer_of_another_server_on_the_port_does_not_make_a_child_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def say_ready(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(say_ready, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        free = [[*free_ports("127.0.0.1", 4), port], free_ports("127.0.0.1", 5)]
        monkeypatch.setattr("inflight.local.stack.free_ports", lambda host, num_ports: free.pop(0))
        async with LocalStack(options(tmp_path, gateways=1)) as stack:
            assert stack.gateways[0].exit_code is None
            assert stack.gateway_addresses != (f"127.0.0.1:{port}",)
    assert not free


async def test_a_port_asked_for_is_used_and_not_replaced(tmp_path: Path) -> None:
    marker = tmp_path / "taken"
    marker.touch()
    (port,) = free_ports("127.0.0.1", 1)
    with pytest.raises(StackError, match="the port is in use") as caught:
        await LocalStack(options(tmp_path, router_args=("--behave", f"port-taken={marker}"), port=port)).start()
    assert f"127.0.0.1:{port}" in str(caught.value)


async def test_a_port_asked_for_that_another_server_has_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        news: list[Progress] = []
        with pytest.raises(StackError, match="cannot listen on 127") as caught:
            await LocalStack(options(tmp_path, gateways=1, gateway_port=other.getsockname()[1]), news.append).start()
        assert caught.value.is_setting
        assert not news


@pytest.mark.parametrize("user", ["", "user:secret@"])
async def test_a_given_redis_that_does_not_answer_is_refused_before_anything_starts(tmp_path: Path, user: str) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    news: list[Progress] = []
    with pytest.raises(StackError, match=rf"--redis-url: Redis at 127.0.0.1:{port} does not answer") as caught:
        await LocalStack(options(tmp_path, redis_url=f"redis://{user}127.0.0.1:{port}/0"), news.append).start()
    assert caught.value.is_setting
    assert "secret" not in str(caught.value)
    assert not news


async def test_a_given_redis_url_that_is_none_is_a_setting_error(tmp_path: Path) -> None:
    with pytest.raises(StackError, match="--redis-url: ") as caught:
        await LocalStack(options(tmp_path, redis_url="redis://127.0.0.1:port/0")).start()
    assert caught.value.is_setting


async def test_a_second_stack_in_the_same_folder_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    async with LocalStack(options(tmp_path)) as stack:
        with pytest.raises(StackError, match=f"serves at {stack.address}"):
            await LocalStack(options(tmp_path)).start()
        assert read_state(tmp_path) is not None
        assert stack.routers[0].exit_code is None


async def test_what_a_killed_stack_left_behind_does_not_stop_the_next(tmp_path: Path) -> None:
    ended = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await ended.wait()
    left = {"pid": ended.pid, "address": "127.0.0.1:1", "redis_url": "redis://x", "processes": []}
    (tmp_path / "state.json").write_text(json.dumps(left))
    assert read_state(tmp_path) is None
    async with LocalStack(options(tmp_path)) as stack:
        state = read_state(tmp_path)
        assert state is not None
        assert state.address == stack.address


async def test_a_process_that_ends_by_itself_is_told_of_once(tmp_path: Path) -> None:
    async with LocalStack(options(tmp_path, executors=2)) as stack:
        victim = stack.executors[0]
        victim.kill()
        async with asyncio.timeout(WAIT_S):
            assert await stack.wait_for_exit() is victim
        assert victim.exit_code == -signal.SIGKILL
        assert victim not in stack.executors
        assert len(stack.executors) == 1


async def test_cancelling_the_start_leaves_nothing(tmp_path: Path) -> None:
    began = asyncio.Event()
    news: list[Progress] = []

    def on_progress(progress: Progress) -> None:
        news.append(progress)
        if progress.name == "router-0" and progress.phase is Phase.READY:
            began.set()

    starting = asyncio.create_task(LocalStack(options(tmp_path, "never-ready"), on_progress).start())
    await began.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    stopped = {progress.name for progress in news if progress.phase is Phase.STOPPED}
    assert stopped == {"redis", "executor-0", "router-0"}
    async with LocalStack(options(tmp_path)):
        pass  # the folder is free again


async def test_a_deaf_process_is_killed_after_its_grace(tmp_path: Path) -> None:
    command = [sys.executable, str(FAKE_SERVER), "executor", "--listen", "127.0.0.1:0", "--behave", "deaf"]
    child = await ChildProcess.start("deaf", "executor", "", command, tmp_path / "deaf.log", {})
    await child.stop(grace_s=0.1)
    assert child.exit_code in (-signal.SIGKILL, -signal.SIGTERM)  # the latter where it had not begun to be deaf


async def test_a_program_that_is_not_there_is_told_in_words(tmp_path: Path) -> None:
    with pytest.raises(StackError, match="cannot run /nowhere/inflight"):
        await LocalStack(options(tmp_path, program=("/nowhere/inflight",))).start()


@pytest.mark.parametrize(("run_dir", "reason"), [("file", "it is a file"), ("file/run", "{}/file is a file")])
def test_a_run_folder_that_is_a_file_or_in_one_is_an_error_that_names_the_setting(
    tmp_path: Path, run_dir: str, reason: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StackError) as caught:
        asyncio.run(LocalStack(options(tmp_path / run_dir)).start())
    assert str(caught.value) == (
        f"--run-dir (INFLIGHT_RUN_DIR): cannot use the run directory {tmp_path / run_dir}: {reason.format(tmp_path)}"
    )
    assert caught.value.is_setting


@linux_only
def test_a_run_folder_that_cannot_be_made_is_an_error_with_the_reason() -> None:
    with pytest.raises(StackError, match=r"cannot use the run directory /proc/run: No such file or directory$"):
        asyncio.run(LocalStack(options(Path("/proc/run"))).start())


@linux_only
def test_killing_the_parent_ends_every_process(tmp_path: Path) -> None:
    up = start_up(tmp_path)
    pids = pids_of(tmp_path)
    assert len(pids) == 3
    up.kill()
    up.communicate()
    assert all_end(pids)


@linux_only
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_up_in_order(tmp_path: Path, number: signal.Signals) -> None:
    up = start_up(tmp_path)
    pids = pids_of(tmp_path)
    up.send_signal(number)
    output, _ = up.communicate(timeout=WAIT_S)
    assert up.returncode == 0
    assert "router-0     stopped" in output
    assert all(is_gone(pid) for pid in pids)
    assert not (tmp_path / "state.json").exists()


@linux_only
def test_up_ends_with_an_error_when_nothing_is_left_that_could_serve(tmp_path: Path) -> None:
    up = start_up(tmp_path)
    state = read_state(tmp_path)
    assert state is not None
    os.kill(next(process.pid for process in state.processes if process.role == "executor"), signal.SIGKILL)
    up.communicate(timeout=WAIT_S)
    assert up.returncode == 1
    assert all(is_gone(process.pid) for process in state.processes)


@linux_only
def test_without_the_kernels_guard_the_end_of_the_pipe_ends_the_command() -> None:
    command = guarded(["sleep", "1000"], by_kernel=False)
    child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(WAIT_S) == -signal.SIGKILL


@linux_only
def test_without_the_kernels_guard_a_command_that_has_ended_takes_its_watcher_along() -> None:
    command = guarded([sys.executable, "-c", "print('done')"], by_kernel=False)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.wait(WAIT_S) == 0
        child.stdin.close()
        # Standard output reaches its end only when the watcher, which holds it too, is gone.
        assert child.stdout.read() == "done\n"
