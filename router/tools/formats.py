"""Formats in which models write tool calls and reasoning: one declarative table.

A format drives both the grammar that constrains an answer (`inflight.router.constraint.answer_grammar`) and the parser
that reads it (`inflight.router.tools.parser`). A TOML file adds formats. Pure, except for `read_formats`.

    layout       a call
    object       begin {"name": "f", "arguments": {…}} end
    list         begin [{"name": "f", "arguments": {…}}, …] end: all calls in one list
    named        begin f middle {…} end, or begin call end, where `call` is a text with {name} and {arguments}
    parameters   begin call end, where `call` is a text with {name} and {parameters}, and `parameter` one with {key} and
                 {value}
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from inflight.common.rpc.json_counts import MAX_NESTING, nests_deeper

Layout = Literal["object", "list", "named", "parameters"]
LAYOUTS: tuple[Layout, ...] = ("object", "list", "named", "parameters")
# How a value is written in the layout `parameters`. text: a text as it is, up to what follows it, and anything else as
# JSON. python: a literal of Python. gemma: JSON with unquoted keys and texts between GEMMA_QUOTE, without escapes.
Values = Literal["text", "python", "gemma"]
VALUES: tuple[Values, ...] = ("text", "python", "gemma")
GEMMA_QUOTE = '<|"|>'
PYTHON_QUOTES = ('"', "'")

MAX_MARKER_CHARACTERS = 64
MAX_CALL_CHARACTERS = 256
# What else may stand in `call` and `parameter`, as regular expressions: the number of the call, an id that the model
# makes up, and whether the value is a text.
PLACEHOLDERS = {"{number}": "[0-9]{1,4}", "{id}": "[A-Za-z0-9]{9}", "{is_text}": "true|false"}


class FormatError(ValueError):
    """A format that cannot be used. The text is for the user."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls. `begin`, `middle` and `end` are markers; `padding` and `separator` is the whitespace or
    punctuation that the model writes around a call's body and between calls.

    `call` and `parameter` are texts with placeholders, of the layouts `named` and `parameters`; `joiner` stands between
    parameters. `encloses_all`: `begin` and `end` stand once around all calls. `call_id` is a text with {name} and
    {number}: the id of an earlier call that the chat template must be given; without it the client's.
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
    call: str = ""
    parameter: str = "<parameter={key}>\n{value}\n</parameter>\n"
    joiner: str = ""
    values: Values = "text"
    encloses_all: bool = False
    call_id: str = ""
    is_bare: bool = False
    detect: tuple[str, ...] = ()

    @property
    def call_parts(self) -> tuple[str, str, str]:
        """What stands before a call's name, after it, and behind the arguments, in the layouts with `call`."""
        if self.layout == "named":
            call, arguments = self.call or f"{{name}}{self.middle}{{arguments}}", "{arguments}"
        else:
            call, arguments = self.call or "<function={name}>\n{parameters}</function>", "{parameters}"
        before, _, rest = call.partition("{name}")
        after, _, end = rest.partition(arguments)
        return before, after, end

    @property
    def parameter_parts(self) -> tuple[str, str, str]:
        """What stands before the key of a parameter, after it, and behind the value."""
        before, _, rest = self.parameter.partition("{key}")
        after, _, end = rest.partition("{value}")
        return before, after, end

    @property
    def markers(self) -> tuple[str, ...]:
        """Every fixed text of a call."""
        texts = [self.begin, self.middle, self.end, self.separator]
        if self.layout in ("named", "parameters"):
            texts += self.call_parts
        if self.layout == "parameters":
            texts += [*self.parameter_parts, GEMMA_QUOTE if self.values == "gemma" else ""]
        return tuple(filter(None, (piece for text in texts for piece in pieces(text)[::2])))


_PLACEHOLDER = re.compile(f"({'|'.join(map(re.escape, PLACEHOLDERS))})")


def pieces(text: str) -> list[str]:
    """Returns the fixed texts in a text, and between each two of them a placeholder of PLACEHOLDERS."""
    return _PLACEHOLDER.split(text)


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
GLM_4_5 = ToolFormat(
    "glm45",
    "parameters",
    "<tool_call>",
    "</tool_call>",
    separator="\n",
    call="{name}\n{parameters}",
    parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    detect=("<arg_key>", "<arg_value>"),
)
DEEPSEEK_V3_2 = ToolFormat(
    "deepseek_v32",
    "parameters",
    "<｜DSML｜function_calls>",
    "</｜DSML｜function_calls>",
    padding="\n",
    separator="\n",
    call='<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>',
    parameter='<｜DSML｜parameter name="{key}" string="{is_text}">{value}</｜DSML｜parameter>\n',
    encloses_all=True,
    detect=("｜DSML｜", "function_calls>"),
)
DEEPSEEK_V3_1 = ToolFormat(
    "deepseek_v31",
    "named",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    call="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
    encloses_all=True,
    detect=("<｜tool▁sep｜>",),
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
    replace(
        GLM_4_5,
        name="glm47",
        separator="",
        call="{name}{parameters}",
        parameter="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
        detect=("</arg_key><arg_value>",),
    ),
    GLM_4_5,
    ToolFormat(
        "minimax_m2",
        "parameters",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        padding="\n",
        separator="\n",
        call='<invoke name="{name}">\n{parameters}</invoke>',
        parameter='<parameter name="{key}">{value}</parameter>\n',
        encloses_all=True,
        detect=("<minimax:tool_call>", "<invoke name="),
    ),
    DEEPSEEK_V3_2,
    replace(
        DEEPSEEK_V3_2,
        name="deepseek_v4",
        begin="<｜DSML｜tool_calls>",
        end="</｜DSML｜tool_calls>",
        detect=("｜DSML｜", "tool_calls>"),
    ),
    replace(
        DEEPSEEK_V3_1,
        name="deepseek_v3",
        separator="\n",
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
        detect=("<｜tool▁sep｜>", "```json"),
    ),
    DEEPSEEK_V3_1,
    ToolFormat(
        "kimi_k2",
        "named",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        call="<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        encloses_all=True,
        call_id="functions.{name}:{number}",
        detect=("<|tool_calls_section_begin|>",),
    ),
    ToolFormat(
        "gemma4",
        "parameters",
        "<|tool_call>",
        "<tool_call|>",
        call="call:{name}{{parameters}}",
        parameter="{key}:{value}",
        joiner=",",
        values="gemma",
        detect=("<|tool_call>", GEMMA_QUOTE),
    ),
    HERMES,
    ToolFormat(
        "mistral_call_id",
        "named",
        "[TOOL_CALLS]",
        call="{name}[CALL_ID]{id}[ARGS]{arguments}",
        detect=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ),
    ToolFormat("mistral_args", "named", "[TOOL_CALLS]", middle="[ARGS]", detect=("[TOOL_CALLS]", "[ARGS]")),
    ToolFormat("mistral", "list", "[TOOL_CALLS]", detect=("[TOOL_CALLS]",)),
    ToolFormat(
        "lfm2",
        "parameters",
        "<|tool_call_start|>[",
        "]<|tool_call_end|>",
        separator=", ",
        call="{name}({parameters})",
        parameter="{key}={value}",
        joiner=", ",
        values="python",
        encloses_all=True,
        detect=("List of tools: ",),
    ),
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
REASONING: tuple[ReasoningFormat, ...] = (
    CHANNELS,
    ReasoningFormat("<|channel>thought", "<channel|>", detect="<channel|>"),
    ReasoningFormat("[THINK]", "[/THINK]", detect="[/THINK]"),
    # Of LFM2.5.
    ReasoningFormat(detect="message.thinking", key="thinking"),
    THINK,
)


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
    flags = {name: given.pop(name, False) for name in ("is_bare", "encloses_all")}
    if not isinstance(detect, list) or not all(isinstance(text, str) and text for text in detect):
        raise FormatError(f"formats.{name}.detect: must be a list of texts")
    for key, flag in flags.items():
        if not isinstance(flag, bool):
            raise FormatError(f"formats.{name}.{key}: must be true or false")
    for key, value in given.items():
        most = MAX_CALL_CHARACTERS if key in ("call", "parameter", "call_id") else MAX_MARKER_CHARACTERS
        if not isinstance(value, str) or len(value) > most:
            raise FormatError(f"formats.{name}.{key}: must be a text of at most {most} characters")
    made = ToolFormat(name, **given, **flags, detect=tuple(detect))
    for key, text in _violations(made):
        raise FormatError(f"formats.{name}.{key}: {text}")
    return made


def _violations(made: ToolFormat) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with a format, each after the name of its field."""
    if not made.begin:
        yield "begin", "must not be empty"
    if made.layout == "named" and not made.middle and not made.call:
        yield "middle", "must not be empty with the layout named"
    if made.layout == "parameters" and not made.end:
        yield "end", "must not be empty with the layout parameters"
    if made.is_bare and made.layout != "object":
        yield "is_bare", "is allowed only with the layout object"
    has_call = made.layout in ("named", "parameters")
    if made.encloses_all and not (has_call and made.end):
        yield "encloses_all", "is allowed only with the layouts named and parameters, and with `end`"
    arguments = "{arguments}" if made.layout == "named" else "{parameters}"
    if made.call and not (has_call and re.fullmatch(rf"(?s).*{{name}}.*{re.escape(arguments)}.*", made.call)):
        yield "call", "must have {name} and then {arguments} with the layout named, {parameters} with parameters"
    before, _, end = made.parameter_parts
    if not re.fullmatch(r"(?s).*\{key\}.+\{value\}.*", made.parameter):
        yield "parameter", "must have {key} and then {value}, with a text between them"
    if made.values not in VALUES:
        yield "values", f"must be one of {', '.join(VALUES)}"
    elif made.values == "text" and not (before.strip() and end.strip()):
        yield "parameter", "must begin and end with a text, where values are text"
    elif made.values != "text" and not made.joiner.strip():
        yield "joiner", f"must not be empty with values = {made.values}"
    if re.search(r"[{}]", made.call_id.replace("{name}", "").replace("{number}", "")):
        yield "call_id", "can have {name} and {number}, and no other braces"


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
