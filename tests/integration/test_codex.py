"""Codex from npm, unmodified, in front of a router with written answers: rounds with a function, a tool of an MCP
server and a patch, which is a custom tool."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.router.constraint.answer_grammar import AnswerRules, ToolSchema
from inflight.router.constraint.source import TOOLS, ConstraintSource
from inflight.router.constraint.worker import Compiler
from inflight.router.tools.formats import FORMATS, AnswerFormat
from inflight.v1 import inference_pb2
from tests.integration.test_agents import CODEX, fetched, printed
from tests.integration.test_gateway_tools import HERMES, gateway_of, spoken
from tests.unit.scripted_router import ScriptedRouter
from tests.unit.test_tool_parser import BY_NAME, written

pytestmark = pytest.mark.slow

# As docs/responses.md has them.
CONFIG = """
model = "smol"
model_provider = "inflight"

[model_providers.inflight]
name = "inflight"
base_url = "{url}/v1"
wire_api = "responses"

[model_providers.inflight.auth]
command = "echo"
args = ["none"]
"""
MCP_SERVER = """
import json, sys

for line in sys.stdin:
    asked = json.loads(line)
    tool = {"name": "name_of", "inputSchema": {"type": "object", "properties": {"n": {"type": "integer"}}}}
    answers = {
        "initialize": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                       "serverInfo": {"name": "names", "version": "1"}},
        "tools/list": {"tools": [tool]},
        "tools/call": {"content": [{"type": "text", "text": "it is called emil"}]},
    }
    if asked.get("method") in answers:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": answers[asked["method"]]}), flush=True)
"""
PATCH = '*** Begin Patch\n*** Update File: secret.txt\n@@\n-the number is 4711\n+the number is "4712"\n*** End Patch'


async def run(command: Path, home: Path, question: str) -> str:
    """Returns what Codex prints."""
    flags = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    said, complaints = await printed([str(command), *flags, question], home, {})
    assert "Model metadata" not in complaints, "Codex has not read /v1/models"
    return said


async def test_codex_reads_a_file_calls_a_tool_of_a_namespace_and_applies_a_patch(tmp_path: Path) -> None:
    command = fetched(CODEX.package, CODEX.command)
    (tmp_path / "secret.txt").write_text("the number is 4711\n")
    (tmp_path / "server.py").write_text(MCP_SERVER)
    calls = [
        ("exec_command", json.dumps({"cmd": "cat secret.txt"})),
        ("mcp__names__name_of", json.dumps({"n": 4711})),
        ("apply_patch", json.dumps({"input": PATCH})),
    ]
    requests: list[inference_pb2.GenerateRequest] = []

    def script(request: inference_pb2.GenerateRequest, context: Any) -> Iterator[inference_pb2.StreamEvent]:
        requests.append(request)
        results = [part.text for one in request.chat.messages if one.role == "tool" for part in one.content]
        if len(results) < len(calls):
            text = "I go on.\n" + written(BY_NAME["hermes"], [calls[len(results)]])
        else:
            text = f"The file had: {results[0]} and {results[1]}"
        yield from spoken(HERMES, f"<think>\nHm.</think>\n\n{text}")

    async with gateway_of(ScriptedRouter(script)) as gateway:
        (tmp_path / ".codex").mkdir()
        server = f'[mcp_servers.names]\ncommand = "{sys.executable}"\nargs = ["{tmp_path / "server.py"}"]\n'
        (tmp_path / ".codex" / "config.toml").write_text(CONFIG.format(url=gateway.url) + server)
        said = await run(command, tmp_path, "Read the file.")
    assert "the number is 4711" in said
    assert "it is called emil" in said
    assert (tmp_path / "secret.txt").read_text() == 'the number is "4712"\n'
    last = requests[-1]
    assert [one.role for one in last.chat.messages].count("system") == 1
    earlier = [(call.name, json.loads(call.arguments)) for one in last.chat.messages for call in one.tool_calls]
    assert earlier == [(name, json.loads(arguments)) for name, arguments in calls]
    # The grammar of patches can be enforced in every format of calls.
    (patch,) = [one for one in last.chat.functions if one.name == "apply_patch"]
    tool = ToolSchema(patch.name, patch.parameters, patch.strict, patch.input_grammar)
    for tools in FORMATS:
        rules = AnswerRules(AnswerFormat(tools), (tool,))
        assert Compiler().compile(ConstraintSource(TOOLS, (rules.to_json(),)).to_json())
