"""The board's events about an executor whose process is killed under load."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from inflight import AsyncClient
from inflight.errors import InflightError
from inflight.local.options import StackOptions
from inflight.local.ports import free_ports
from inflight.local.stack import LocalStack


def board_of(address: str) -> dict[str, Any]:
    """The first line of the board's stream."""
    with urllib.request.urlopen(f"http://{address}/board/stats", timeout=60) as stream:
        line: dict[str, Any] = json.loads(stream.readline())
    return line


async def board_once(address: str, is_there: Any) -> dict[str, Any]:
    """The board's part of a first line that has what is waited for."""
    async with asyncio.timeout(60):
        while True:
            board: dict[str, Any] = (await asyncio.to_thread(board_of, address))["board"]
            if is_there(board):
                return board
            await asyncio.sleep(0.2)


async def load(client: AsyncClient) -> None:
    """One long request after the other, of any end."""
    while True:
        with suppress(InflightError):
            await client.complete("t1 t2 t3", max_tokens=900, ignore_eos=True)


def running(board: dict[str, Any], executor: str) -> list[str]:
    """Requests that get tokens on an executor."""
    live = [one for one in board.get("requests", ()) if "outcome" not in one and one["stages"]]
    last = [(one["id"], one["stages"][-1]) for one in live]
    return [name for name, stage in last if stage["stage"] == "decode" and stage["executor"] == executor]


async def test_killed_executor_is_an_event_with_the_number_of_requests_moved(tmp_path: Path, tiny_model: Path) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    http = f"127.0.0.1:{port}"
    options = StackOptions(
        executors=2, model=str(tiny_model), run_dir=tmp_path, router_args=("--http-listen", http),
        executor_args=("--max-num-sequences", "4", "--num-threads", "1"),
    )  # fmt: skip
    async with LocalStack(options) as stack, AsyncClient(stack.address) as client:
        pids = {one["name"]: one["pid"] for one in json.loads((tmp_path / "state.json").read_text())["processes"]}
        calls = [asyncio.create_task(load(client)) for _ in range(8)]
        await board_once(http, lambda board: len(running(board, "executor-0")) >= 1)
        os.kill(pids["executor-0"], signal.SIGKILL)
        board = await board_once(http, lambda board: any(one["kind"] == "executor_lost" for one in board["events"]))
        (lost,) = [one for one in board["events"] if one["kind"] == "executor_lost"]
        moved = [
            one["id"]
            for one in board["requests"]
            if any(stage.get("why") == "executor_lost" for stage in one["stages"])
        ]  # fmt: skip
        assert lost["subject"] == "executor-0"
        assert lost["count"] >= 1
        assert lost["text"].startswith(f"executor-0 lost, {lost['count']} request")
        # One that had all its output and not its end does not run again.
        assert 1 <= len(moved) <= lost["count"]
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
