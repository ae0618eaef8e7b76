"""What a model's chat template does about tools and reasoning, and the prompt for one that does nothing about tools.

Templates are programs that do not list what they support, so it is read from their text and found by rendering.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.router.tools.formats import (
    GEMMA_QUOTE,
    HERMES,
    REASONING,
    ReasoningFormat,
    ToolFormat,
    Values,
    detected,
    with_added,
)

PROBE = "inflightprobetool"
PROBE_ID = "inflight1"
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
    """What a model supports. `tools` None: no tool calls. `in_template`: its template shows tools to the model;
    `shows_calls`: it shows earlier calls; `takes_text`: it takes their arguments as text."""

    tools: ToolFormat | None = None
    in_template: bool = False
    shows_calls: bool = False
    takes_text: bool = False
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
    return (*(tools.markers if tools else ()), *(reasoning.markers if reasoning else ()))


def find_support(
    templates: Sequence[str], render_tools: Callable[[list[Message], list[Any]], str], settings: ToolSettings
) -> ToolSupport:
    """Returns what the templates of a model support. `render_tools` renders messages with tools; it may raise."""
    if not templates:
        return ToolSupport()
    in_template = _shows_tools(render_tools)
    shows_calls, takes_text = _shown_calls(render_tools)
    found = detected(templates, settings.formats)
    if settings.chosen != DETECTED:
        tools: ToolFormat | None = settings.formats[settings.chosen]
    elif in_template:
        tools = found
    else:
        # A template that shows calls does so in its model's format.
        tools = (found if shows_calls and found else HERMES) if settings.writes_prompt else None
    text = "\0".join(templates)
    return ToolSupport(
        tools if in_template or settings.writes_prompt else None,
        in_template,
        # A template may show calls in another format than the one that the router describes.
        shows_calls and (in_template or tools == found),
        takes_text,
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


def _shown_calls(render_tools: Callable[[list[Message], list[Any]], str]) -> tuple[bool, bool]:
    """Returns whether a template shows earlier calls, and whether it takes their arguments only as text."""
    for arguments in ({PROBE: 1}, f'{{"{PROBE}": 1}}'):
        call = {"type": "function", "id": PROBE_ID, "function": {"name": "f", "arguments": arguments}}
        messages: list[Message] = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "1", "tool_call_id": PROBE_ID},
        ]
        try:
            if PROBE in render_tools(messages, []):
                return True, isinstance(arguments, str)
        except Exception:
            continue  # a template is a program: it can raise anything
    return False, False


def history(messages: Sequence[Message], support: ToolSupport) -> list[Message]:
    """Returns messages whose calls are as the model's template takes them."""
    tools = support.tools
    if tools is None or not any(message.get("tool_calls") for message in messages):
        return list(messages)
    if not support.shows_calls:
        return [_with_plain_calls(message, tools) for message in messages]
    ids: dict[str, str] = {}
    return [_with_calls_for(message, support, tools.call_id, ids) for message in messages]


def _with_calls_for(message: Message, support: ToolSupport, form: str, ids: dict[str, str]) -> Message:
    """Returns a message whose calls have the ids and arguments that a template takes. `ids` maps the client's ids."""
    made = dict(message)
    if "tool_calls" in message:
        made["tool_calls"] = [dict(call, function=dict(call["function"])) for call in message["tool_calls"]]
    for call in made.get("tool_calls", ()):
        function = call["function"]
        if form:
            written = form.replace("{name}", function["name"]).replace("{number}", str(len(ids)))
            ids[call.get("id", "")] = call["id"] = written
        if support.takes_text:
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    if message.get("tool_call_id") in ids:
        made["tool_call_id"] = ids[message["tool_call_id"]]
    return made


def template_function(name: str, description: str, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a function in the form that templates take, which is OpenAI's. `parameters` is a JSON schema."""
    schema = {"type": "object", "properties": {}} if parameters is None else parameters
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def with_tool_prompt(
    messages: Sequence[Message], functions: Sequence[dict[str, Any]], support: ToolSupport
) -> list[Message]:
    """Returns a conversation whose tools, and results that the template does not show, are plain text: for templates
    without tools."""
    assert support.tools is not None
    turns = list(messages) if support.shows_calls else [_with_plain_result(message) for message in messages]
    prompt = _tool_prompt(functions, support.tools)
    if turns and turns[0]["role"] == "system":
        return [{**turns[0], "content": f"{turns[0]['content']}\n\n{prompt}"}, *turns[1:]]
    return [{"role": "system", "content": prompt}, *turns]


def _tool_prompt(functions: Sequence[dict[str, Any]], tools: ToolFormat) -> str:
    listed = "\n".join(json.dumps(one, ensure_ascii=False) for one in functions)
    example = written_calls([("NAME", {"ARGUMENT": "VALUE"})], tools)
    return (
        "You may call functions to answer the user. The functions are, as JSON:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        f"To call a function, write its name and its arguments like this:\n{example}"
    )


def _with_plain_result(message: Message) -> Message:
    """Returns a message without the role of results, which are text in it."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    return message


def _with_plain_calls(message: Message, tools: ToolFormat) -> Message:
    """Returns a message without calls, which are text in it."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    if not calls:
        return message
    spoken = [message["content"]] if message["content"] else []
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join([*spoken, written_calls(calls, tools)])}


def written_calls(calls: Sequence[tuple[str, Mapping[str, Any]]], tools: ToolFormat) -> str:
    """Returns calls as a model writes them."""
    bodies = [_body(name, arguments, number, tools) for number, (name, arguments) in enumerate(calls)]
    if tools.encloses_all:
        return f"{tools.begin}{tools.padding}{tools.separator.join(bodies)}{tools.padding}{tools.end}"
    if tools.layout == "list":
        return f"{tools.begin}[{', '.join(bodies)}]{tools.end}"
    begin = "" if tools.is_bare else tools.begin
    between = tools.separator or "\n"
    return between.join(f"{begin}{tools.padding}{body}{tools.padding}{tools.end}" for body in bodies)


def _body(name: str, arguments: Mapping[str, Any], number: int, tools: ToolFormat) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    if tools.layout in ("object", "list"):
        return f'{{"{tools.name_key}": {json.dumps(name)}, "{tools.arguments_key}": {text}}}'
    if tools.layout == "parameters":
        before, after, end = tools.parameter_parts
        text = tools.joiner.join(
            f"{before}{key}{after.replace('{is_text}', json.dumps(isinstance(value, str)))}"
            f"{written_value(value, tools.values)}{end}"
            for key, value in arguments.items()
        )
    before, after, end = tools.call_parts
    after = after.replace("{number}", str(number)).replace("{id}", PROBE_ID)
    return f"{before}{name}{after}{text}{end}"


def written_value(value: Any, notation: Values) -> str:
    """Returns the value of a parameter in the notation of a format."""
    if notation == "text":
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    is_gemma = notation == "gemma"
    match value:
        case str():
            return f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}" if is_gemma else json.dumps(value, ensure_ascii=False)
        case dict():
            members = (
                f"{key if is_gemma else json.dumps(key, ensure_ascii=False)}:{'' if is_gemma else ' '}"
                f"{written_value(one, notation)}"
                for key, one in value.items()
            )
            return f"{{{(',' if is_gemma else ', ').join(members)}}}"
        case list():
            return f"[{(',' if is_gemma else ', ').join(written_value(one, notation) for one in value)}]"
        case _:
            return json.dumps(value) if is_gemma else repr(value)
