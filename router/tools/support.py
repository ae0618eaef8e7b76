"""What a model's chat template does about tools and reasoning, and the prompt for one that does nothing about tools.

Templates are programs that do not list what they support, so it is read from their text and found by rendering.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.router.tools.formats import HERMES, REASONING, ReasoningFormat, ToolFormat, detected, with_added

PROBE = "inflightprobetool"
DETECTED = "auto"
# Template variables: how much a model reasons, and whether it does.
EFFORT_VARIABLE, THINKING_VARIABLE = "reasoning_effort", "enable_thinking"
NO_EFFORT = "none"

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """The settings of a router about tools. `formats` is the table; `chosen` is a name in it, or `auto`.
    `writes_prompt`: templates without tools get a system message about them."""

    formats: Mapping[str, ToolFormat] = field(default_factory=lambda: with_added(()))
    chosen: str = DETECTED
    writes_prompt: bool = True


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """What a model supports. `tools` None: no tool calls. `in_template`: its template shows tools to the model."""

    tools: ToolFormat | None = None
    in_template: bool = False
    reasoning: ReasoningFormat | None = None
    has_effort: bool = False
    has_thinking_switch: bool = False

    def __str__(self) -> str:
        if self.tools is None:
            tools = "no tool calls"
        else:
            shown = "by its chat template" if self.in_template else "by a system message"
            tools = f"tool calls in the format {self.tools.name}, tools shown {shown}"
        return f"{tools}; {'no reasoning' if self.reasoning is None else f'reasoning ends with {self.reasoning.end}'}"

    def effort_variables(self, effort: str) -> dict[str, Any]:
        """Returns the template's variables for an effort, which is a hint: a template may have none for it."""
        if effort == NO_EFFORT and self.has_thinking_switch:
            return {THINKING_VARIABLE: False}
        return {EFFORT_VARIABLE: effort} if effort and self.has_effort else {}


def markers_of(support: ToolSupport) -> tuple[str, ...]:
    """Returns the markers of a model's calls and reasoning."""
    tools, reasoning = support.tools, support.reasoning
    markers = (tools.begin, tools.middle, tools.end, tools.separator) if tools else ()
    return (*filter(None, markers), *(reasoning.markers if reasoning else ()))


def find_support(
    templates: Sequence[str], render_tools: Callable[[list[Message], list[Any]], str], settings: ToolSettings
) -> ToolSupport:
    """Returns what the templates of a model support. `render_tools` renders messages with tools; it may raise."""
    if not templates:
        return ToolSupport()
    in_template = _shows_tools(render_tools)
    if settings.chosen != DETECTED:
        tools: ToolFormat | None = settings.formats[settings.chosen]
    elif in_template:
        tools = detected(templates, settings.formats)
    else:
        tools = HERMES if settings.writes_prompt else None
    text = "\0".join(templates)
    return ToolSupport(
        tools if in_template or settings.writes_prompt else None,
        in_template,
        next((one for one in REASONING if one.detect in text), None),
        has_effort=EFFORT_VARIABLE in text,
        has_thinking_switch=THINKING_VARIABLE in text,
    )


def _shows_tools(render_tools: Callable[[list[Message], list[Any]], str]) -> bool:
    parameters = {"type": "object", "properties": {}}
    tool = {"type": "function", "function": {"name": PROBE, "description": PROBE, "parameters": parameters}}
    try:
        return PROBE in render_tools([{"role": "user", "content": "hello"}], [tool])
    except Exception:
        return False  # a template is a program: it can raise anything


def template_function(name: str, description: str, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a function in the form that templates take, which is OpenAI's. `parameters` is a JSON schema."""
    schema = {"type": "object", "properties": {}} if parameters is None else parameters
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def with_tool_prompt(
    messages: Sequence[Message], functions: Sequence[dict[str, Any]], tools: ToolFormat
) -> list[Message]:
    """Returns a conversation with its tools as plain text: for templates without tools."""
    turns = [_plain(message, tools) for message in messages]
    prompt = _tool_prompt(functions, tools)
    if turns and turns[0]["role"] == "system":
        return [{**turns[0], "content": f"{turns[0]['content']}\n\n{prompt}"}, *turns[1:]]
    return [{"role": "system", "content": prompt}, *turns]


def _tool_prompt(functions: Sequence[dict[str, Any]], tools: ToolFormat) -> str:
    listed = "\n".join(json.dumps(one, ensure_ascii=False) for one in functions)
    example = written_call("NAME", {"ARGUMENT": "VALUE"}, tools)
    return (
        "You may call functions to answer the user. The functions are, as JSON:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        f"To call a function, write its name and its arguments like this:\n{example}"
    )


def _plain(message: Message, tools: ToolFormat) -> Message:
    """Returns a message without calls and results, which are text in it."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        written_call(call["function"]["name"], call["function"]["arguments"], tools)
        for call in message.get("tool_calls", ())
    ]
    if not calls:
        return message
    spoken = [message["content"]] if message["content"] else []
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join([*spoken, *calls])}


def written_call(name: str, arguments: Mapping[str, Any], tools: ToolFormat) -> str:
    """Returns a call as a model writes it."""
    text = json.dumps(arguments, ensure_ascii=False)
    call = f'{{"{tools.name_key}": {json.dumps(name)}, "{tools.arguments_key}": {text}}}'
    match tools.layout:
        case "object":
            return f"{'' if tools.is_bare else tools.begin}{tools.padding}{call}{tools.padding}{tools.end}"
        case "list":
            return f"{tools.begin}[{call}]{tools.end}"
        case "named":
            return f"{tools.begin}{name}{tools.middle}{text}{tools.end}"
        case _:
            parameters = "".join(
                f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
                for key, value in arguments.items()
            )
            padding = tools.padding
            return f"{tools.begin}{padding}<function={name}>\n{parameters}</function>{padding}{tools.end}"
