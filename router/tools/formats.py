"""Formats in which models write tool calls and reasoning: one declarative table.

A format drives both the grammar that constrains an answer (`inflight.router.constraint.answer_grammar`) and the parser
that reads it (`inflight.router.tools.parser`). A TOML file adds formats. Pure, except for `read_formats`.

    layout       a call
    object       begin {"name": "f", "arguments": {…}} end
    list         begin [{"name": "f", "arguments": {…}}, …] end: all calls in one list
    named        begin f middle {…} end
    parameters   begin <function=f> <parameter=key>value</parameter> … </function> end
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from inflight.common.rpc.json_counts import MAX_NESTING, nests_deeper

Layout = Literal["object", "list", "named", "parameters"]
LAYOUTS: tuple[Layout, ...] = ("object", "list", "named", "parameters")

MAX_MARKER_CHARACTERS = 64


class FormatError(ValueError):
    """A format that cannot be used. The text is for the user."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls. `begin`, `middle` and `end` are markers; `padding` and `separator` is the whitespace or
    punctuation that the model writes around a call's body and between calls.

    `is_bare`: the calls may begin the answer without the marker `begin`, and constrained ones do. `detect` are texts of
    which a chat template has all if its model uses the format.
    """

    name: str
    layout: Layout
    begin: str
    end: str = ""
    middle: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    padding: str = ""
    separator: str = ""
    is_bare: bool = False
    detect: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around reasoning; `detect`, a text that the chat template has if its model uses them; and `key`, the
    member of a message in which the template takes earlier reasoning.

    The other fields are for models that write each part of an answer as a message of its own. `next_message` comes
    before every message but the first; `content` begins the message with the content, `preamble` one with content
    before a call, both end with `end`; `frames` are other markers around messages. None of them is content.
    """

    begin: str = "<think>"
    end: str = "</think>"
    detect: str = "</think>"
    key: str = "reasoning_content"
    next_message: str = ""
    content: str = ""
    preamble: str = ""
    frames: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Every marker."""
        own = (self.begin, self.end, self.next_message, self.content, self.preamble, *self.frames)
        return tuple(filter(None, own))


HERMES = ToolFormat(
    "hermes", "object", "<tool_call>", "</tool_call>", padding="\n", separator="\n", detect=("<tool_call>",)
)

# In the order in which they are looked for in a chat template.
FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(
        "qwen3_coder",
        "parameters",
        "<tool_call>",
        "</tool_call>",
        padding="\n",
        separator="\n",
        detect=("<function=", "<parameter="),
    ),
    HERMES,
    ToolFormat("mistral_args", "named", "[TOOL_CALLS]", middle="[ARGS]", detect=("[TOOL_CALLS]", "[ARGS]")),
    ToolFormat("mistral", "list", "[TOOL_CALLS]", detect=("[TOOL_CALLS]",)),
    ToolFormat(
        "llama3_json",
        "object",
        "<|python_tag|>",
        arguments_key="parameters",
        separator="; ",
        is_bare=True,
        detect=("ipython", '"parameters"'),
    ),
    # A call ends the answer of gpt-oss, to which <|call|> is an end of the sequence.
    ToolFormat(
        "harmony",
        "named",
        "<|channel|>commentary to=functions.",
        middle=" <|constrain|>json<|message|>",
        separator="<|call|><|start|>assistant",
        detect=("<|channel|>commentary", "functions."),
    ),
)
THINK = ReasoningFormat()
CHANNELS = ReasoningFormat(
    begin="<|channel|>analysis<|message|>",
    end="<|end|>",
    detect="<|channel|>analysis<|message|>",
    key="thinking",
    next_message="<|start|>assistant",
    content="<|channel|>final<|message|>",
    preamble="<|channel|>commentary<|message|>",
    frames=("<|call|>", "<|return|>"),
)
# In the order in which they are looked for in a chat template.
REASONING: tuple[ReasoningFormat, ...] = (CHANNELS, THINK)


def with_added(formats: Iterable[ToolFormat]) -> dict[str, ToolFormat]:
    """Returns the table by name, with formats added or replaced; the added ones are detected first."""
    added = {one.name: one for one in formats}
    return added | {one.name: one for one in FORMATS if one.name not in added}


def detected(templates: Iterable[str], formats: Mapping[str, ToolFormat]) -> ToolFormat | None:
    """Returns the format that a model's chat templates show; None if they show none."""
    text = "\0".join(templates)
    return next((one for one in formats.values() if one.detect and all(part in text for part in one.detect)), None)


def read_formats(path: Path) -> tuple[ToolFormat, ...]:
    """Reads formats from a TOML file with a table `[formats.NAME]` for each. Raises `FormatError`."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} is not TOML: {error}") from None
    tables = content.pop("formats", {})
    if content or not isinstance(tables, dict) or not tables:
        raise FormatError(f"{path} must have tables [formats.NAME] and nothing else")
    return tuple(_format_of(name, table) for name, table in tables.items())


def _format_of(name: str, table: Any) -> ToolFormat:
    known = {one.name for one in fields(ToolFormat)} - {"name"}
    if not isinstance(table, dict):
        raise FormatError(f"formats.{name}: must be a table")
    if unknown := set(table) - known:
        raise FormatError(f"formats.{name}: has {', '.join(sorted(unknown))}; allowed are {', '.join(sorted(known))}")
    if table.get("layout") not in LAYOUTS:
        raise FormatError(f"formats.{name}.layout: must be one of {', '.join(LAYOUTS)}")
    given = dict(table)
    detect = given.pop("detect", [])
    is_bare = given.pop("is_bare", False)
    if not isinstance(detect, list) or not all(isinstance(text, str) and text for text in detect):
        raise FormatError(f"formats.{name}.detect: must be a list of texts")
    if not isinstance(is_bare, bool):
        raise FormatError(f"formats.{name}.is_bare: must be true or false")
    for key, value in given.items():
        if not isinstance(value, str) or len(value) > MAX_MARKER_CHARACTERS:
            raise FormatError(f"formats.{name}.{key}: must be a text of at most {MAX_MARKER_CHARACTERS} characters")
    made = ToolFormat(name, **given, is_bare=is_bare, detect=tuple(detect))
    if not made.begin:
        raise FormatError(f"formats.{name}.begin: must not be empty")
    if made.layout == "named" and not made.middle:
        raise FormatError(f"formats.{name}.middle: must not be empty with the layout named")
    if made.layout == "parameters" and not made.end:
        raise FormatError(f"formats.{name}.end: must not be empty with the layout parameters")
    if is_bare and made.layout != "object":
        raise FormatError(f"formats.{name}.is_bare: is allowed only with the layout object")
    return made


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How one answer is read: the format of its calls and reasoning, and what depends on the request.

    `tools` None: it makes no calls. `reasoning` None: it has no reasoning. `in_reasoning`: the prompt opened the
    reasoning. `texts`: the parameters of each function that are text, which the layout `parameters` does not show.
    `must_call`: an answer without a call is not complete. `is_constrained`: the content has a form that the request
    asked for.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    in_reasoning: bool = False
    texts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    must_call: bool = False
    is_constrained: bool = False

    def to_json(self) -> str:
        """Returns the format as routers store it with the request."""
        return json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":"))


def answer_format(text: str) -> AnswerFormat:
    """Returns the format that `to_json` wrote, by this or another version of a router. Raises `FormatError` for any
    other text, because the text comes back from an executor."""
    if nests_deeper(text.encode("utf-8", "surrogatepass")):
        raise FormatError(f"is nested more than {MAX_NESTING} levels deep")
    try:
        stored = json.loads(text)
    except ValueError:
        raise FormatError("is not JSON") from None
    if not isinstance(stored, dict) or not stored.keys() >= {"tools", "reasoning", "in_reasoning", "texts"}:
        raise FormatError("has not the members of a format")
    tools, reasoning, texts = stored["tools"], stored["reasoning"], stored["texts"]
    # Earlier versions of a router do not store the last two.
    flags = {name: stored.get(name, False) for name in ("in_reasoning", "must_call", "is_constrained")}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise FormatError(f"{name}: must be true or false")
    if not isinstance(texts, dict) or not all(_are_texts(parameters) for parameters in texts.values()):
        raise FormatError("texts: must be lists of texts")
    return AnswerFormat(
        None if tools is None else _stored_tools(tools),
        None if reasoning is None else _stored_reasoning(reasoning),
        texts={name: tuple(parameters) for name, parameters in texts.items()},
        **flags,
    )


def _stored_tools(stored: Any) -> ToolFormat:
    known = _known(stored, ToolFormat)
    name = known.pop("name", None)
    if not isinstance(name, str):
        raise FormatError("tools.name: must be a text")
    return _format_of(name, known)


def _stored_reasoning(stored: Any) -> ReasoningFormat:
    known = _known(stored, ReasoningFormat)
    frames = known.pop("frames", [])
    if not _are_texts([*known.values()]) or not _are_texts(frames):
        raise FormatError("reasoning: must have texts")
    made = ReasoningFormat(**known, frames=tuple(frames))
    if not made.begin or not made.end:
        raise FormatError("reasoning: begin and end must not be empty")
    return made


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _known(stored: Any, kind: type[ToolFormat | ReasoningFormat]) -> dict[str, Any]:
    """Returns the fields of `kind`. Those that another version added are ignored."""
    if not isinstance(stored, dict):
        raise FormatError(f"{kind.__name__}: must be an object")
    names = {one.name for one in fields(kind)}
    return {key: value for key, value in stored.items() if key in names}
