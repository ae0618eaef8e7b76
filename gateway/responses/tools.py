"""Tools of `/v1/responses` and the choice among them, and the functions of a chat that they are. Pure.

A custom tool takes a text instead of an object: it is a function with the one argument `input`. The functions of a
namespace have its name before theirs. Tools that OpenAI's servers run, or that only its models know, are hints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from inflight.gateway.bodies import Body, Parameters, UnknownChoice
from inflight.v1 import inference_pb2

SEPARATOR = "__"
INPUT_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class FlatFunctionTool(Body):
    """A function that the model may call. `defer_loading` is a hint."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class CustomFormat(Body):
    """The form of the text that a custom tool takes."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    @model_validator(mode="after")
    def _check_grammar(self) -> CustomFormat:
        for name, value in (("syntax", self.syntax), ("definition", self.definition)):
            if (self.type == "grammar") != (value is not None):
                word = "required" if self.type == "grammar" else "allowed only"
                raise ValueError(f"{name}: is {word} with the type grammar")
        return self


class CustomTool(Body):
    """A tool that takes a text. `defer_loading` is a hint."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: CustomFormat | None = None
    defer_loading: bool | None = None

    @property
    def grammar(self) -> CustomFormat | None:
        """The form of its text, if it has one."""
        return self.format if self.format is not None and self.format.type == "grammar" else None


def _kind(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _among(*kinds: str) -> Discriminator:
    """Returns what tells tools of these types from each other and from all others."""

    def tag(tool: Any) -> str:
        kind = _kind(tool)
        return f"[{kind}]" if kind in kinds else "[other]"

    return Discriminator(tag)


class OtherTool(Body):
    """A tool that this system does not have."""

    model_config = ConfigDict(extra="allow")

    type: str


# The brackets tell the alternatives from the names of parameters in the place of an error.
InnerTool = Annotated[
    Annotated[FlatFunctionTool, Tag("[function]")]
    | Annotated[CustomTool, Tag("[custom]")]
    | Annotated[OtherTool, Tag("[other]")],
    _among("function", "custom"),
]


class NamespaceTool(Body):
    """Tools with names of their own, such as those of an MCP server."""

    type: Literal["namespace"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    tools: list[InnerTool]


Tool = Annotated[
    Annotated[FlatFunctionTool, Tag("[function]")]
    | Annotated[CustomTool, Tag("[custom]")]
    | Annotated[NamespaceTool, Tag("[namespace]")]
    | Annotated[OtherTool, Tag("[other]")],
    _among("function", "custom", "namespace"),
]


def name_in_chat(name: str, namespace: str | None) -> str:
    """Returns the name of a chat's function."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith(SEPARATOR) else f"{namespace}{SEPARATOR}{name}"


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool that the model may call, and the path of it in the body. `introduction` is the description of its
    namespace."""

    tool: FlatFunctionTool | CustomTool
    path: str
    namespace: str | None = None
    introduction: str | None = None

    @property
    def name(self) -> str:
        """The name of the chat's function."""
        return name_in_chat(self.tool.name, self.namespace)

    def of_chat(self) -> dict[str, Any]:
        """Returns it as a tool of a chat."""
        tool = self.tool
        described = [self.introduction, tool.description]
        if isinstance(tool, FlatFunctionTool):
            function = {"parameters": tool.parameters, "strict": tool.strict}
        else:
            function = {"parameters": INPUT_PARAMETERS, "strict": True}
            if tool.grammar is not None:
                language = "Lark grammar" if tool.grammar.syntax == "lark" else "regular expression"
                described.append(f"The input is a text of this {language}:\n{tool.grammar.definition}")
        description = "\n\n".join(filter(None, described)) or None
        return {"type": "function", "function": {"name": self.name, "description": description, **function}}


def offered(tools: Sequence[Any] | None, path: str = "tools") -> Iterator[Offered]:
    """Yields the tools that a model may call. Of a namespace, the first has its description."""
    for number, tool in enumerate(tools or ()):
        if isinstance(tool, NamespaceTool):
            inner = offered(tool.tools, f"{path}[{number}].tools")
            for place, one in enumerate(inner):
                yield replace(one, namespace=tool.name, introduction=None if place else tool.description)
        elif isinstance(tool, FlatFunctionTool | CustomTool):
            yield Offered(tool, f"{path}[{number}]")


def set_inputs(functions: Iterable[inference_pb2.Function], tools: Iterable[Offered]) -> None:
    """Sets the forms of the texts that custom tools take. The functions are those of the tools, in order."""
    for function, one in zip(functions, tools, strict=True):
        if isinstance(one.tool, CustomTool) and one.tool.grammar is not None:
            field = "input_grammar" if one.tool.grammar.syntax == "lark" else "input_regex"
            setattr(function, field, one.tool.grammar.definition)


def unused_tools(tools: Sequence[Any] | None, path: str = "tools") -> Iterator[str]:
    """Yields the tools that have no effect, and hints of others."""
    for number, tool in enumerate(tools or ()):
        if isinstance(tool, OtherTool):
            yield f"{path}[{number}]"
        elif isinstance(tool, NamespaceTool):
            yield from unused_tools(tool.tools, f"{path}[{number}].tools")
        elif tool.defer_loading is not None:
            yield f"{path}[{number}].defer_loading"


class ToolChoiceNamed(Body):
    """A function or a custom tool in `tool_choice`."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None

    def of_chat(self) -> dict[str, Any]:
        """Returns it as that of a chat."""
        return {"type": "function", "function": {"name": name_in_chat(self.name, self.namespace)}}


class ToolChoiceOther(Body):
    """A tool among the allowed ones that this system does not have."""

    model_config = ConfigDict(extra="allow")

    type: str


def _allowed_tag(tool: Any) -> str:
    kind = _kind(tool)
    return "[named]" if kind in ("function", "custom") else "[other]"


class ToolChoiceAllowed(Body):
    """Tools in `tool_choice`, of which the model may or must call one."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[
        Annotated[
            Annotated[ToolChoiceNamed, Tag("[named]")] | Annotated[ToolChoiceOther, Tag("[other]")],
            Discriminator(_allowed_tag),
        ]
    ]

    @model_validator(mode="after")
    def _check_tools(self) -> ToolChoiceAllowed:
        if not any(isinstance(tool, ToolChoiceNamed) for tool in self.tools):
            raise ValueError("tools: must have at least one function or custom tool")
        return self

    def of_chat(self) -> dict[str, Any]:
        """Returns it as that of a chat."""
        tools = [tool.of_chat() for tool in self.tools if isinstance(tool, ToolChoiceNamed)]
        return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": tools}}


class UnknownToolChoice(UnknownChoice):
    """A choice that is refused for its type, or because it is no object."""

    type: Literal["function", "custom", "allowed_tools"]  # type: ignore[assignment]


def _choice_tag(choice: Any) -> str:
    kind = _kind(choice)
    return {"function": "[named]", "custom": "[named]", "allowed_tools": "[allowed_tools]"}.get(
        kind if isinstance(kind, str) else "", "[unknown]"
    )


ToolChoice = Annotated[
    Annotated[ToolChoiceNamed, Tag("[named]")]
    | Annotated[ToolChoiceAllowed, Tag("[allowed_tools]")]
    | Annotated[UnknownToolChoice, Tag("[unknown]")],
    Discriminator(_choice_tag),
]

_BEGINNING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Whole characters of a string of JSON: surrogates in pairs, or one that has no other.
_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u]|\\u(?:[^dD]|[dD][^c-fC-F]))"
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u])*"
)


class InputText:
    """The text of a custom tool's call, from the pieces of its arguments."""

    def __init__(self) -> None:
        self._rest = ""
        self._has_begun = False

    def feed(self, piece: str) -> str:
        """Takes the next piece of the arguments. Returns the next piece of the text."""
        self._rest += piece
        if not self._has_begun:
            found = _BEGINNING.match(self._rest)
            if found is None:
                return ""
            self._has_begun = True
            self._rest = self._rest[found.end() :]
        found = _CHARACTERS.match(self._rest)
        assert found is not None
        self._rest = self._rest[found.end() :]
        return _decoded(found[0])


def _decoded(text: str) -> str:
    """Returns the text of a string of JSON. A surrogate without its other half becomes U+FFFD."""
    decoded = json.loads(f'"{text}"', strict=False)
    assert isinstance(decoded, str)
    return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
