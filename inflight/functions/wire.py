"""Tools and the choice among them, from plain values in OpenAI's form to messages of the protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inflight.v1 import inference_pb2

# {"type": "function", "function": {…}} as in OpenAI's chat completions, or only what is in `function`.
Tool = Mapping[str, Any]
# "none", "auto", "required", the name of a function, or one of OpenAI's objects.
ToolChoice = str | Mapping[str, Any]

MODES = {
    "none": inference_pb2.ToolChoice.MODE_NONE,
    "auto": inference_pb2.ToolChoice.MODE_AUTO,
    "required": inference_pb2.ToolChoice.MODE_REQUIRED,
}
_MEMBERS = frozenset({"name", "description", "parameters", "strict"})


def function_of(tool: Tool) -> inference_pb2.Function:
    """Returns a function. Raises `ValueError`, whose text continues the name of the parameter."""
    described = tool
    if isinstance(tool, Mapping) and tool.get("type") == "function" and "function" in tool:
        described = tool["function"]
        unknown = set(tool) - {"type", "function"}
    else:
        unknown = set(tool) - _MEMBERS - {"type"} if isinstance(tool, Mapping) else set()
    if not isinstance(described, Mapping) or tool.get("type", "function") != "function":
        raise ValueError("must be an object with the type function")
    if unknown := unknown | (set(described) - _MEMBERS - {"type"}):
        raise ValueError(
            f"has {', '.join(sorted(map(str, unknown)))[:100]}; a function has {', '.join(sorted(_MEMBERS))}"
        )
    parameters = described.get("parameters")
    try:
        return inference_pb2.Function(
            name=described.get("name", ""),
            description=described.get("description") or "",
            parameters="" if parameters is None else json.dumps(parameters, ensure_ascii=False),
            strict=bool(described.get("strict")),
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"is not a function: {error}") from None


def set_tool_choice(wire: inference_pb2.ToolChoice, choice: ToolChoice) -> None:
    """Sets a choice. Raises `ValueError`, whose text continues the name of the parameter."""
    if isinstance(choice, str):
        if choice in MODES:
            wire.mode = MODES[choice]
        else:
            _name(wire, choice)
        return
    if not isinstance(choice, Mapping):
        raise ValueError("must be a text or an object")
    match choice.get("type"):
        case "function":
            _name(wire, _name_of(choice))
        case "allowed_tools":
            allowed = choice.get("allowed_tools", choice)
            mode, tools = allowed.get("mode", "auto"), allowed.get("tools")
            if mode not in ("auto", "required") or not isinstance(tools, Sequence) or not tools:
                raise ValueError("must have the mode auto or required and a list of tools")
            wire.mode = MODES[mode]
            wire.names.extend(_name_of(tool) for tool in tools)
        case _:
            raise ValueError("must have the type function or allowed_tools")


def _name(wire: inference_pb2.ToolChoice, name: str) -> None:
    wire.mode = inference_pb2.ToolChoice.MODE_REQUIRED
    wire.names.append(name)
    wire.parallel = False


def _name_of(tool: Any) -> str:
    described = tool.get("function", tool) if isinstance(tool, Mapping) else tool
    name = described.get("name") if isinstance(described, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ValueError("must name a function")
    return name
