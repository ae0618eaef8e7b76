"""Coding agents and Anthropic's client from npm, unmodified, in front of a router with written answers: a round with a
tool."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
QUESTION = "Read the file."
ANTHROPIC_TYPESCRIPT = "@anthropic-ai/sdk@1.14.0"
DRIVER = Path(__file__).parents[1] / "clients" / "drive_anthropic.mjs"


def folder_of(*packages: str) -> Path:
    """Returns a folder with npm packages ("name@version"), fetched once; skips where npm cannot. A run of tests tries
    once."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = FOLDER / "+".join(packages).replace("/", "+")
    refusal = folder / f"refused-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        is_there = (folder / "package.json").exists()  # npm writes it when it has installed everything
        if not is_there and not refusal.exists() and (reason := _install(packages, folder)):
            refusal.write_text(f"npm has not fetched {', '.join(packages)}: {reason}")
        if refusal.exists():
            pytest.skip(refusal.read_text())
    return folder


def fetched(package: str, command: str) -> Path:
    """Returns the command of an npm package."""
    return folder_of(package) / "node_modules" / ".bin" / command


def _install(packages: Sequence[str], folder: Path) -> str:
    """Returns why npm has not installed packages; an empty text if it has."""
    install = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", *packages]
    try:
        subprocess.run(install, capture_output=True, text=True, timeout=240, check=True)
    except subprocess.TimeoutExpired:
        return "it takes more than 240 s"
    except subprocess.CalledProcessError as failed:
        return str(failed.stderr).strip()[-200:] or "it failed"
    return ""


@dataclass(frozen=True, slots=True)
class Agent:
    """A coding agent: its package and command, a call of its tool that reads a file, and how it is started.

    `arguments`, `commands` and `variables` may name the gateway's `{url}` and the `{model}`; `files` are written into
    its home folder first, and `commands` run there one after the other.
    """

    package: str
    command: str
    tool: str
    parameters: Callable[[str], dict[str, Any]]
    commands: tuple[tuple[str, ...], ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def call(self, path: Path) -> tuple[str, str]:
        """Returns the name and the arguments of a call that reads a file."""
        return self.tool, json.dumps(self.parameters(str(path)))

    async def run(self, url: str, model: str, home: Path) -> str:
        """Starts it in a folder with a question, and returns what it has printed at its end."""

        def filled(text: str) -> str:
            return text.replace("{url}", url).replace("{model}", model)

        for name, content in self.files.items():
            (home / name).write_text(filled(json.dumps(content)))
        variables = {name: filled(value) for name, value in self.variables.items()}
        program, said = fetched(self.package, self.command), ""
        for arguments in self.commands:
            said, _ = await printed([str(program), *map(filled, arguments)], home, variables)
        return said


async def printed(command: list[str], home: Path, variables: Mapping[str, str]) -> tuple[str, str]:
    """Returns what a program prints to its output and to its errors in a home folder of its own. It must succeed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=home,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **variables},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        said, complaints = await asyncio.wait_for(process.communicate(), 240)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, complaints.decode()[-3000:]
    return said.decode(), complaints.decode()


# As docs/agents.md describes them.
CLAUDE_CODE = Agent(
    package="@anthropic-ai/claude-code@2.1.197",
    command="claude",
    tool="Read",
    parameters=lambda path: {"file_path": path},
    commands=(("-p", QUESTION, "--allowedTools", "Read"),),
    variables={
        "ANTHROPIC_BASE_URL": "{url}",
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "{model}",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    },
)
OPENCODE = Agent(
    package="opencode-ai@1.18.33",
    command="opencode",
    tool="read",
    parameters=lambda path: {"filePath": path},
    commands=(("run", QUESTION),),
    variables={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1"},
    files={
        "opencode.json": {
            "model": "inflight/{model}",
            "provider": {
                "inflight": {
                    "npm": "@ai-sdk/openai-compatible",
                    "options": {"baseURL": "{url}/v1", "apiKey": "none"},
                    "models": {"{model}": {}},
                }
            },
            "agent": {"title": {"disable": True}},
            "autoupdate": False,
        }
    },
)
QWEN_CODE = Agent(
    package="@qwen-code/qwen-code@0.24.4",
    command="qwen",
    tool="read_file",
    parameters=lambda path: {"file_path": path},
    commands=(("-p", QUESTION),),
    variables={
        "OPENAI_BASE_URL": "{url}/v1",
        "OPENAI_API_KEY": "none",
        "OPENAI_MODEL": "{model}",
    },
)
CLINE = Agent(
    package="cline@3.0.65",
    command="cline",
    tool="read_files",
    parameters=lambda path: {"files": [{"path": path}]},
    commands=(
        ("auth", "--provider", "openai", "--baseurl", "{url}/v1", "--apikey", "none", "--modelid", "{model}"),
        (QUESTION,),
    ),
    variables={"CLINE_SESSION_BACKEND_MODE": "local"},  # without it, a daemon stays
)
CODEX = Agent(
    package="@openai/codex@0.171.0",
    command="codex",
    tool="exec_command",
    parameters=lambda path: {"cmd": f"cat {path}"},
    commands=(
        (
            *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
            *("-c", 'model="{model}"', "-c", 'model_provider="inflight"'),
            *("-c", 'model_providers.inflight={name="inflight",base_url="{url}/v1",wire_api="responses"}'),
            QUESTION,
        ),
    ),
)
AGENTS = {agent.command: agent for agent in (CLAUDE_CODE, OPENCODE, QWEN_CODE, CLINE, CODEX)}


@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
async def test_agent_reads_a_file_and_says_what_it_has(agent: Agent, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the number is 4711\n")
    rounds: list[list[str]] = []

    def script(request: inference_pb2.GenerateRequest, context: Any) -> Iterator[inference_pb2.StreamEvent]:
        results = [part.text for one in request.chat.messages if one.role == "tool" for part in one.content]
        text = "I read it.\n"
        if agent.tool in {function.name for function in request.chat.functions}:
            assert request.want_queue_events, "it is not streamed"
            rounds.append(results)
            found = re.search(r"the number is (\d+)", " ".join(results))
            text = f"It is {found[1]}." if found else text + written(BY_NAME["hermes"], [agent.call(secret)])
        yield from spoken(HERMES, f"<think>\nHm.</think>\n\n{text}")

    async with gateway_of(ScriptedRouter(script)) as gateway:
        assert "It is 4711." in await agent.run(gateway.url, "smol", tmp_path)
    assert [len(results) for results in rounds] == [0, 1]


async def test_anthropics_client_for_typescript_gets_texts_and_calls(tmp_path: Path) -> None:
    folder = folder_of(ANTHROPIC_TYPESCRIPT)
    call = ("add", '{"a": 1}')

    def script(request: inference_pb2.GenerateRequest, context: Any) -> Iterator[inference_pb2.StreamEvent]:
        results = [part.text for one in request.chat.messages if one.role == "tool" for part in one.content]
        text = f"It is {results[0]}." if results else "I add.\n" + written(BY_NAME["hermes"], [call])
        yield from spoken(HERMES, text if request.chat.functions else "<think>\nHm.</think>\n\nHello there.")

    async with gateway_of(ScriptedRouter(script)) as gateway:
        output, _ = await printed(["node", str(DRIVER), str(folder), gateway.url, "smol"], tmp_path, {})
    said = json.loads(output)
    thinking, text = said["whole"]
    assert (thinking["thinking"], text) == ("Hm.", {"type": "text", "text": "Hello there."})
    assert [block["type"] for block in said["streamed"]] == ["thinking", "text"]
    assert said["streamed"][1] == text
    assert said["pieces"] > 1
    assert said["stops"] == ["end_turn", "end_turn", "tool_use", "end_turn"]
    assert (said["use"]["name"], said["use"]["input"]) == ("add", {"a": 1})
    assert said["answer"] == [{"type": "text", "text": "It is 3."}]
