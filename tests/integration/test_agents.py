"""Coding agents from npm, unmodified, in front of a router with written answers: a round with a tool."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from inflight.v1 import inference_pb2
from tests.integration.test_gateway_tools import HERMES, gateway_of, spoken
from tests.unit.scripted_router import ScriptedRouter
from tests.unit.test_tool_parser import BY_NAME, written

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / ".clients" / "agents"
CLAUDE_CODE = "@anthropic-ai/claude-code@2.1.197"


def fetched(package: str, command: str) -> Path:
    """Returns the command of an npm package ("name@version"), fetched once; skips where npm cannot."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = FOLDER / package.replace("/", "+")
    path = folder / "node_modules" / ".bin" / command
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not path.exists():
            install = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", package]
            done = subprocess.run(install, capture_output=True, text=True, timeout=300)
            if done.returncode:
                pytest.skip(f"npm cannot fetch {package}: {done.stderr.strip()[-200:]}")
    return path


@pytest.fixture(scope="session")
def claude() -> Path:
    return fetched(CLAUDE_CODE, "claude")


async def test_claude_code_reads_a_file_and_says_what_it_has(claude: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the number is 4711\n")
    call = ("Read", json.dumps({"file_path": str(secret)}))
    offered: list[set[str]] = []

    def script(request: inference_pb2.GenerateRequest, context: Any) -> Iterator[inference_pb2.StreamEvent]:
        results = [part.text for one in request.chat.messages if one.role == "tool" for part in one.content]
        offered.append({function.name for function in request.chat.functions})
        text = f"The file says: {results[0]}" if results else "I read it.\n" + written(BY_NAME["hermes"], [call])
        yield from spoken(HERMES, f"<think>\nHm.</think>\n\n{text}")

    async with gateway_of(ScriptedRouter(script)) as gateway:
        models = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
        settings = {
            "ANTHROPIC_BASE_URL": gateway.url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "HOME": str(tmp_path),
            **dict.fromkeys(models, "smol"),
        }
        agent = await asyncio.create_subprocess_exec(
            *(claude, "-p", "Read the file.", "--allowedTools", "Read", "--output-format", "json"),
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], **settings},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            said, complaints = await asyncio.wait_for(agent.communicate(), 240)
        finally:
            if agent.returncode is None:
                agent.kill()
    assert agent.returncode == 0, complaints.decode()
    answer = json.loads(said)
    assert not answer["is_error"]
    assert "the number is 4711" in answer["result"]
    assert answer["num_turns"] == 2
    assert all("Read" in names for names in offered)
