"""The incremental parser of answers: text in, reasoning, content and tool calls out.

A pure state machine. What it has returned after a text is a function of that text alone, however it was cut, so that
the parser of a resumed stream is rebuilt by feeding the text so far. Work and memory are in proportion to the text.
A call that begins within the reasoning ends it: models forget the end of the reasoning there.
Invariants: the arguments of a call are passed on as they were written; a call has its name before any arguments; a
complete call without arguments has `{}`, and one that is cut off has none; one that is cut off before its name, and a
marker of a message that is cut off, are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from inflight.common.rpc.json_counts import nests_deeper
from inflight.router.tools.formats import GEMMA_QUOTE, PLACEHOLDERS, PYTHON_QUOTES, AnswerFormat, ToolFormat, pieces

# A longer name or key is none.
MAX_NAME_CHARACTERS = 256
_SPACE = re.compile(r"\s*")
_STRING_PART = re.compile(r'["\\]')
_VALUE_PART = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[\s,}\])]")
NO_ARGUMENTS = "{}"
# Spaces that a model may put in place of those within a fixed text of a call.
MAX_SPACES = 8
# What JSON writes otherwise than Python.
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call with its complete name. Calls count from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    """A call is complete."""

    index: int


Part = Reasoning | Content | CallBegins | Arguments | CallEnds

# What a state returns: the next state, or None if it needs more text.
State = Callable[[], "State | None"]


class AnswerParser:
    """Parses one answer. `feed` takes every piece of its text, `finish` ends it."""

    def __init__(self, answer: AnswerFormat) -> None:
        self._answer = answer
        self._format = answer.tools
        self._text = ""
        self._at = 0
        # How far the text after `_at` has been searched, by a state that waits for the end of spaces or of a value.
        self._num_seen = 0
        # The beginning of a call that may still turn out to be content.
        self._mark = 0
        self._parts: list[Part] = []
        self.num_calls = 0
        self._names_call = False
        self._buffered: list[str] = []
        self._has_arguments = False
        self._name = ""
        self._key = ""
        self._keeps_space = True
        self._may_reason = answer.reasoning is not None
        # Markers around messages, which are no content; those of them that content follows; and what stands between
        # calls.
        framed = answer.reasoning if answer.reasoning is not None and answer.reasoning.next_message else None
        self._frames = () if framed is None else framed.markers
        self._contents = () if framed is None else (framed.content, framed.preamble)
        lacks_separator = self._format is None or self._format.is_bare or self._format.encloses_all
        separator = "" if lacks_separator or self._format is None else self._format.separator.strip()
        self._separators = (separator,) if separator else ()
        self._may_be_bare = self._format is not None and self._format.is_bare
        interrupting = () if self._frames or self._may_be_bare else self._call_markers()
        self._reasoning_end = _Markers(() if answer.reasoning is None else (answer.reasoning.end, *interrupting))
        # Whether a call has begun within the reasoning.
        self._interrupts = False
        self._after_content = _Markers((*self._call_markers(), *self._frames))
        self._shape = None if self._format is None else _Shape.of(self._format)
        self._depth = 0
        self._is_string = False
        self._emits = False
        self._after_value: State = self._lead
        self._num_parameters = 0
        self._drops_newline = False
        # Of a value that is not JSON: the open brackets, whether a key comes next, and what ends the text in it.
        self._brackets: list[str] = []
        self._at_key = False
        self._quote = ""
        self._state: State = self._reasoning_lead if answer.in_reasoning else self._lead

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within the reasoning."""
        return self._state in (self._reasoning, self._reasoning_lead)

    @property
    def is_in_content(self) -> bool:
        """Whether the text so far ends within content."""
        return self._state == self._content

    @property
    def num_held(self) -> int:
        """The number of characters that are not yet part of anything: what follows decides about them."""
        return len(self._text) - self._at

    @property
    def is_unfinished(self) -> bool:
        """Whether the answer is not complete if the text ends here, or may be incomplete: within a call, before a call
        that it must have, or in content whose form only the executor knows."""
        is_in_call = self._names_call or (self._is_tentative and not self._is_between_calls)
        lacks_call = self._answer.must_call and not self.num_calls
        return is_in_call or lacks_call or self._answer.is_constrained

    @property
    def may_reason(self) -> bool:
        """Whether reasoning may still begin."""
        return self._may_reason and self._state == self._lead

    def feed(self, text: str) -> list[Part]:
        """Takes more text and returns the parts that it completes."""
        # A local name, so that a text that is held back is extended in place.
        held, self._text = self._text, ""
        held += text
        self._text = held
        del held
        while (following := self._state()) is not None:
            self._state = following
        kept = min(self._at, self._mark) if self._is_tentative else self._at
        if kept:
            self._text, self._at, self._mark = self._text[kept:], self._at - kept, self._mark - kept
            self._num_seen = max(0, self._num_seen - kept)
        return self._taken()

    def finish(self) -> list[Part]:
        """Ends the answer and returns what was held back."""
        if self._is_tentative and not self._is_between_calls:
            if self._format is not None and self._text.startswith("{", self._mark):
                self._say(self._text[self._mark :])
        elif self._names_call:
            self._parts.append(CallEnds(self.num_calls))
            self.num_calls += 1
        elif self.is_reasoning:
            self._parts.append(Reasoning(self._text[self._at :]))
        elif self._state == self._lead and (self._frames or not self._keeps_space):
            rest = self._text[self._at :].lstrip()
            self._say("" if any(frame.startswith(rest) for frame in self._frames) else rest)
        elif self._state not in (
            self._after_arguments, self._call_end, self._list_end, self._bare_separator, self._item, self._enclosed
        ):  # fmt: skip
            self._say(self._text[self._at :])
        self._text, self._at, self._names_call = "", 0, False
        self._state = self._ended
        return self._taken()

    def _ended(self) -> State | None:
        return None

    def _taken(self) -> list[Part]:
        parts, self._parts = list(merged(self._parts)), []
        return parts

    # Text outside calls ----------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        if text:
            self._parts.append(Content(text))

    def _reasoning_lead(self) -> State | None:
        self._skip_space()
        return self._reasoning if self._at < len(self._text) else None

    def _reasoning(self) -> State | None:
        found, end = self._find(self._reasoning_end)
        if self._at < end:
            self._parts.append(Reasoning(self._text[self._at : end]))
        self._at = end
        if found is None:
            return None
        if self._answer.reasoning is None or found != self._answer.reasoning.end:
            self._interrupts = True
            return self._begin_call(end, end + len(found))
        self._at += len(found)
        self._keeps_space = False
        return self._lead

    def _lead(self) -> State | None:
        """At the beginning of the answer, or after reasoning or a call: whitespace may belong to what follows."""
        end = self._end_of_space()
        if end == len(self._text):
            return None
        rest = self._text[end : end + 1]
        if self._may_reason and self._answer.reasoning is not None:
            begin = self._answer.reasoning.begin
            if self._text.startswith(begin, end):
                self._may_reason, self._at = False, end + len(begin)
                return self._reasoning_lead
            if begin.startswith(self._text[end:]):
                return None
        frames = (*self._separators, *self._frames) if self.num_calls else self._frames
        if self._interrupts and self._answer.reasoning is not None:
            frames = (*frames, self._answer.reasoning.end)
        for frame in frames:
            if self._text.startswith(frame, end):
                return self._after_frame(frame, end + len(frame))
        if any(frame.startswith(self._text[end:]) for frame in frames):
            return None
        self._may_reason = False
        if self._may_be_bare and rest == "{":
            self._may_be_bare = False
            return self._begin_call(end, end)
        for marker in self._call_markers():
            if self._text.startswith(marker, end):
                return self._begin_call(end, end + len(marker))
            if marker.startswith(self._text[end:]):
                return None
        if not self._keeps_space:
            self._at = end
        self._may_be_bare = False
        return self._content

    def _after_frame(self, frame: str, at: int) -> State:
        self._at, self._keeps_space, self._may_reason = at, False, bool(self._frames)
        if self._answer.reasoning is not None and frame == self._answer.reasoning.begin:
            return self._reasoning_lead
        return self._content if frame in self._contents else self._lead

    def _content(self) -> State | None:
        found, end = self._find(self._after_content)
        self._say(self._text[self._at : end])
        self._at = end
        if found is None:
            return None
        if found in self._frames:
            return self._after_frame(found, end + len(found))
        return self._begin_call(end, end + len(found))

    def _call_markers(self) -> tuple[str, ...]:
        return () if self._format is None else (self._format.begin,)

    def _find(self, markers: _Markers) -> tuple[str | None, int]:
        """Returns the first marker and where it begins, or None and where text begins that may become one."""
        found = markers.pattern.search(self._text, self._at)
        if found is not None:
            return found[0], found.start()
        num_held = max((_num_held(self._text, marker, self._at) for marker in markers.texts), default=0)
        return None, len(self._text) - num_held

    def _end_of_space(self) -> int:
        found = _SPACE.match(self._text, max(self._at, self._num_seen))
        assert found is not None
        if found.end() == len(self._text):
            self._num_seen = found.end()
        return found.end()

    def _skip_space(self) -> None:
        self._at = self._end_of_space()

    # Calls -----------------------------------------------------------------------------------------------------------

    @property
    def _tools(self) -> ToolFormat:
        assert self._format is not None
        return self._format

    @property
    def _is_tentative(self) -> bool:
        """Whether a call has begun whose name is not complete."""
        return self._mark >= 0 and self._in_call and not self._names_call

    @property
    def _is_between_calls(self) -> bool:
        """Whether one of several calls between the same markers has ended and no other has begun."""
        return self._state in (self._item, self._enclosed) and self.num_calls > 0

    _in_call = False

    def _begin_call(self, mark: int, body: int) -> State:
        """Begins a call, or a list of calls, whose marker is at `mark`."""
        self._mark, self._at = mark, body
        self._may_be_bare = False
        match self._tools.layout:
            case "object":
                return self._next_call(self._object)
            case "list":
                self._in_call = True
                return self._list
            case _ if self._tools.encloses_all:
                self._in_call = True
                return self._enclosed
            case _:
                return self._next_call(self._call)

    def _next_call(self, state: State) -> State:
        self._in_call, self._names_call, self._has_arguments = True, False, False
        self._buffered, self._name = [], ""
        return state

    def _broken(self) -> State:
        """The text since the mark is no call: it is what was before it. After the name there is only an end of the
        call."""
        if self._names_call:
            self._end_call()
        elif self._interrupts and not self.num_calls:
            self._parts.append(Reasoning(self._text[self._mark : self._at]))
            self._in_call = self._interrupts = False
            return self._reasoning
        else:
            self._say(self._text[self._mark : self._at])
        self._in_call, self._keeps_space = False, True
        return self._content

    def _set_name(self, name: str) -> None:
        self._names_call = True
        self._parts.append(CallBegins(self.num_calls, name))
        self._argue("".join(self._buffered))
        self._buffered = []

    def _argue(self, text: str) -> None:
        if not text:
            return
        self._has_arguments = True
        if self._names_call:
            self._parts.append(Arguments(self.num_calls, text))
        else:
            self._buffered.append(text)

    def _end_call(self) -> None:
        if not self._has_arguments:
            self._parts.append(Arguments(self.num_calls, NO_ARGUMENTS))
        self._parts.append(CallEnds(self.num_calls))
        self.num_calls += 1
        self._in_call = self._names_call = False
        self._keeps_space = False

    def _expect(self, text: str, following: State) -> State | None:
        """Skips whitespace and takes `text`; anything else breaks the call."""
        self._skip_space()
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return following
        if text.startswith(self._text[self._at :]):
            return None
        return self._broken

    # Objects {"name": …, "arguments": …} and lists of them ------------------------------------------------------------

    def _list(self) -> State | None:
        return self._expect("[", self._item)

    def _item(self) -> State | None:
        """At an element of the list of calls, or its end."""
        self._skip_space()
        if self._at == len(self._text):
            return None
        if self._text[self._at] == "]":
            self._at += 1
            self._in_call = False
            return self._list_end if self._tools.end else self._lead
        if self._text[self._at] == ",":
            self._at += 1
            return self._item
        self._mark = self._at if self.num_calls else self._mark
        return self._next_call(self._object)

    def _list_end(self) -> State | None:
        return self._optional(self._tools.end, self._lead)

    def _object(self) -> State | None:
        return self._expect("{", self._object_key)

    def _object_key(self) -> State | None:
        self._skip_space()
        if self._at == len(self._text):
            return None
        character = self._text[self._at]
        if character == ",":
            self._at += 1
            return self._object_key
        if character == "}":
            self._at += 1
            return self._object_end
        return self._key_string if character == '"' else self._broken

    def _key_string(self) -> State | None:
        key = self._whole_string()
        if key is None:
            return self._broken if self._is_too_long() else None
        self._key = key
        return self._colon

    def _colon(self) -> State | None:
        return self._expect(":", self._object_value)

    def _object_value(self) -> State | None:
        self._skip_space()
        if self._at == len(self._text):
            return None
        if self._key == self._tools.name_key and not self._names_call:
            return self._name_string if self._text[self._at] == '"' else self._broken
        return self._value(self._object_key, emits=self._key == self._tools.arguments_key and not self._has_arguments)

    def _name_string(self) -> State | None:
        name = self._whole_string()
        if name is None:
            return self._broken if self._is_too_long() else None
        if not name:
            return self._broken
        self._set_name(name)
        return self._object_key

    def _object_end(self) -> State | None:
        if not self._names_call:
            return self._broken
        self._end_call()
        if self._tools.layout == "list":
            self._in_call = True
            self._mark = self._at
            return self._item
        if self._tools.is_bare:
            return self._bare_separator
        return self._call_end if self._tools.end else self._lead

    def _call_end(self) -> State | None:
        return self._optional(self._tools.end, self._lead)

    def _optional(self, marker: str, following: State) -> State | None:
        """Skips whitespace and a marker; without the marker, content follows."""
        end = self._end_of_space()
        if self._text.startswith(marker, end):
            self._at = end + len(marker)
            return following
        return None if marker.startswith(self._text[end:]) else following

    def _bare_separator(self) -> State | None:
        """After a call of a format without an end: a semicolon or a comma leads to the next."""
        end = self._end_of_space()
        if end == len(self._text):
            return None
        if self._text[end] not in ";,":
            return self._lead
        mark, self._at = end, end + 1
        self._mark = mark
        return self._next_call(self._object)

    def _whole_string(self) -> str | None:
        """Takes a JSON string if it is complete."""
        end = self._at + 1
        while (found := _STRING_PART.search(self._text, end)) is not None:
            if found[0] == '"' and found.end() - self._at > MAX_NAME_CHARACTERS:
                return None
            if found[0] == '"':
                raw = self._text[self._at : found.end()]
                try:
                    value: str = json.loads(raw, strict=False)
                    value.encode()
                except ValueError:
                    value = ""
                self._at = found.end()
                return value
            end = found.end() + 1
        return None

    def _is_too_long(self, marker: str = "") -> bool:
        """Returns whether no name can be complete any more. Then it skips as much of the text as a name may have."""
        if len(self._text) - self._at <= MAX_NAME_CHARACTERS + len(marker):
            return False
        self._at = self._at + MAX_NAME_CHARACTERS
        return True

    # JSON values -----------------------------------------------------------------------------------------------------

    def _value(self, following: State, *, emits: bool) -> State:
        """Begins to take a JSON value, as arguments if it `emits`."""
        self._after_value, self._emits = following, emits
        self._depth, self._is_string = 0, False
        return self._scalar if self._text[self._at] not in '"{[' else self._nested

    def _scalar(self) -> State | None:
        found = _SCALAR_END.search(self._text, self._at)
        end = len(self._text) if found is None else found.start()
        self._take_value(end)
        return None if found is None else self._after_value

    def _nested(self) -> State | None:
        """Takes a string, an object or a list."""
        at = self._at
        while True:
            if self._is_string:
                found = _STRING_PART.search(self._text, at)
                if found is not None and found[0] == "\\":
                    if found.end() == len(self._text):
                        # The escaped character is still to come.
                        self._take_value(found.start())
                        return None
                    at = found.end() + 1
                    continue
            else:
                found = _VALUE_PART.search(self._text, at)
            if found is None:
                self._take_value(len(self._text))
                return None
            at = found.end()
            if found[0] == '"':
                self._is_string = not self._is_string
            else:
                self._depth += 1 if found[0] in "{[" else -1
            if self._depth <= 0 and not self._is_string:
                self._take_value(at)
                return self._after_value

    def _take_value(self, end: int) -> None:
        if self._emits:
            self._argue(self._text[self._at : end])
        self._at = end

    # A text with a name and arguments or parameters ------------------------------------------------------------------

    @property
    def _parts_of_call(self) -> _Shape:
        assert self._shape is not None
        return self._shape

    def _enclosed(self) -> State | None:
        """Between calls that have one beginning and one end in common."""
        self._skip_space()
        if self._at == len(self._text):
            return None
        for text, following in ((self._tools.end.strip(), self._lead), (self._tools.separator.strip(), self._enclosed)):
            passed = self._passed(text) if text else False
            if passed:
                self._in_call = following == self._enclosed
                return following
            if passed is None:
                return None
        self._mark = self._at if self.num_calls else self._mark
        return self._next_call(self._call)

    def _passed(self, text: str) -> bool | None:
        """Takes a fixed text whose spaces may be others, and returns whether it stands here; None if more text decides
        it."""
        at = self._at
        for number, word in enumerate(text.split()):
            if number:
                most = at + MAX_SPACES
                while at < most and self._text[at : at + 1].isspace():
                    at += 1
            if not self._text.startswith(word, at):
                return None if word.startswith(self._text[at:]) else False
            at += len(word)
        self._at = at
        return True

    def _call(self) -> State | None:
        self._skip_space()
        return self._if_passed(self._parts_of_call.before_name, self._name_text)

    def _if_passed(self, text: str, following: State) -> State | None:
        passed = self._passed(text)
        return following if passed else self._broken if passed is False else None

    def _name_text(self) -> State | None:
        shape = self._parts_of_call
        if shape.name_end:
            text = self._until(shape.name_end)
        else:
            # What follows the name is not part of what separates it.
            found = shape.after_name.pattern.search(self._text, self._at, self._at + MAX_NAME_CHARACTERS)
            text = None if found is None else self._text[self._at : found.start()]
            self._at = self._at if found is None else found.start()
        if text is None:
            return self._broken if self._is_too_long(shape.name_end) else None
        self._name, self._num_parameters = shape.name_rest.sub("", text).strip(), 0
        if not self._name:
            return self._broken
        self._set_name(self._name)
        return self._named_arguments if self._tools.layout == "named" else self._parameter

    def _until(self, marker: str) -> str | None:
        """Takes the text before a marker, and the marker, if that is complete."""
        at = self._text.find(marker, self._at, self._at + MAX_NAME_CHARACTERS + len(marker))
        if at < 0:
            return None
        text, self._at = self._text[self._at : at], at + len(marker)
        return text

    def _named_arguments(self) -> State | None:
        self._skip_space()
        if self._at == len(self._text):
            return None
        if self._text[self._at] == "{":
            return self._value(self._named_end, emits=True)
        # Some models write nothing for no arguments.
        closing = self._parts_of_call.end or self._tools.end
        passed = self._passed(closing) if closing else False
        if passed:
            return self._named_end
        return self._broken if passed is False else None

    def _named_end(self) -> State | None:
        self._end_call()
        return self._after_arguments if self._parts_of_call.end else self._after_call()

    def _after_arguments(self) -> State | None:
        return self._optional(self._parts_of_call.end, self._after_call())

    def _after_call(self) -> State:
        """Returns the state after a call up to the end that is its own."""
        if self._tools.encloses_all:
            self._in_call, self._mark = True, self._at
            return self._enclosed
        return self._call_end if self._tools.end else self._lead

    def _parameter(self) -> State | None:
        self._skip_space()
        if self._at == len(self._text):
            return None
        shape = self._parts_of_call
        if self._num_parameters and shape.joiner and self._text.startswith(shape.joiner, self._at):
            self._at += len(shape.joiner)
            self._skip_space()
        ends = self._passed(shape.end or self._tools.end)
        if ends:
            self._argue("}" if self._num_parameters else NO_ARGUMENTS)
            self._end_call()
            return self._after_call() if shape.end else self._lead
        begins = self._passed(shape.before_key)
        if ends is None or begins is None:
            return None
        return self._parameter_name if begins else self._broken

    def _parameter_name(self) -> State | None:
        shape = self._parts_of_call
        key = self._until(shape.key_end)
        if key is None:
            return self._broken if self._is_too_long(shape.key_end) else None
        self._key = key.strip().removeprefix(GEMMA_QUOTE).removesuffix(GEMMA_QUOTE)
        self._argue(f"{', ' if self._num_parameters else '{'}{json.dumps(self._key, ensure_ascii=False)}: ")
        self._num_parameters += 1
        return self._after_key

    def _after_key(self) -> State | None:
        others = self._parts_of_call.after_key
        if others:
            self._skip_space()
        return self._if_passed(others, self._value_kind)

    def _value_kind(self) -> State | None:
        """At a value, or at the attribute that says whether it is a text."""
        shape = self._parts_of_call
        if self._tools.values != "text":
            self._brackets, self._at_key = [], False
            return self._literal
        is_text = self._key in self._answer.texts.get(self._name, ())
        if shape.attribute_end:
            attribute = self._until(shape.attribute_end)
            if attribute is None:
                return self._broken if self._is_too_long(shape.attribute_end) else None
            is_text = attribute == "true"
        self._drops_newline = shape.drops_newlines
        if not is_text:
            return self._parameter_value
        self._argue('"')
        return self._parameter_text

    def _parameter_value(self) -> State | None:
        """Takes a value of another type than text, as a whole: it is JSON, or else text."""
        end = self._parts_of_call.value_end
        at = self._text.find(end, max(self._at, self._num_seen - len(end)))
        if at < 0:
            self._num_seen = len(self._text)
            return None
        text = self._text[self._at : at].strip()
        self._at = at + len(end)
        self._argue(text if _is_json(text) else json.dumps(text, ensure_ascii=False))
        return self._parameter

    def _parameter_text(self) -> State | None:
        """Takes a text, without the line ends next to its tags where these are not part of it."""
        if self._drops_newline:
            if self._at == len(self._text):
                return None
            self._at += self._text[self._at] == "\n"
            self._drops_newline = False
        found, end = self._find(self._parts_of_call.value_ends)
        self._argue(json.dumps(self._text[self._at : end], ensure_ascii=False)[1:-1])
        self._at = end
        if found is None:
            return None
        self._at += len(found)
        self._argue('"')
        return self._parameter

    # Values in another notation than JSON ----------------------------------------------------------------------------

    def _literal(self) -> State | None:
        """At a value, a key or a punctuation mark."""
        self._skip_space()
        if self._at == len(self._text):
            return None
        character = self._text[self._at]
        if character in "{[":
            self._brackets.append(character)
            self._at_key = character == "{"
        elif character in "}]" and self._brackets:
            self._brackets.pop()
            self._at_key = False
        elif character in ",:" and self._brackets:
            self._at_key = character == "," and self._brackets[-1] == "{"
        else:
            return self._text_or_name()
        self._argue(character if character in "{[}]" else f"{character} ")
        self._at += 1
        return self._after_literal() if character in "}]" else self._literal

    def _after_literal(self) -> State:
        return self._literal if self._brackets or self._at_key else self._parameter

    def _text_or_name(self) -> State | None:
        is_gemma = self._tools.values == "gemma"
        for quote in (GEMMA_QUOTE,) if is_gemma else PYTHON_QUOTES:
            if self._text.startswith(quote, self._at):
                self._at, self._quote = self._at + len(quote), quote
                self._argue('"')
                return self._raw_text if is_gemma else self._escaped_text
            if quote.startswith(self._text[self._at :]):
                return None
        return self._bare_key if is_gemma and self._at_key else self._bare

    def _bare_key(self) -> State | None:
        key = self._until(":")
        if key is None:
            return self._broken if self._is_too_long(":") else None
        self._argue(f"{json.dumps(key.strip(), ensure_ascii=False)}: ")
        self._at_key = False
        return self._literal

    def _bare(self) -> State | None:
        """Takes a number or a name as a whole."""
        found = _SCALAR_END.search(self._text, max(self._at, self._num_seen))
        if found is None:
            self._num_seen = len(self._text)
            return None
        text = self._text[self._at : found.start()]
        if not text:
            return self._broken
        self._at = found.start()
        text = _PYTHON_NAMES.get(text, text)
        self._argue(text if _is_json(text) else json.dumps(text, ensure_ascii=False))
        return self._after_literal()

    def _raw_text(self) -> State | None:
        """Takes a text without escapes."""
        found, end = self._find(_GEMMA_QUOTE)
        self._argue(json.dumps(self._text[self._at : end], ensure_ascii=False)[1:-1])
        self._at = end
        return None if found is None else self._text_end

    def _escaped_text(self) -> State | None:
        """Takes a text with the escapes of Python, which are nearly those of JSON."""
        found = _PYTHON_PARTS[self._quote].search(self._text, self._at)
        end = len(self._text) if found is None else found.start()
        self._argue(json.dumps(self._text[self._at : end], ensure_ascii=False)[1:-1])
        self._at = end
        if found is None:
            return None
        if found[0] == self._quote:
            return self._text_end
        escaped = self._text[end + 1 : end + 2]
        if not escaped:
            return None
        self._at += 2
        if escaped == "'":
            self._argue("'")
        elif escaped in _JSON_ESCAPED:
            self._argue(f"\\{escaped}")
        else:
            self._argue(json.dumps(f"\\{escaped}", ensure_ascii=False)[1:-1])
        return self._escaped_text

    def _text_end(self) -> State:
        self._at += len(self._quote)
        self._argue('"')
        return self._after_literal()


class _Markers:
    """Texts of which the first is looked for."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(texts)
        self.pattern = re.compile("|".join(map(re.escape, self.texts)) or "(?!)")


_GEMMA_QUOTE = _Markers((GEMMA_QUOTE,))
_PYTHON_PARTS = {quote: re.compile(rf"[{quote}\\]") for quote in PYTHON_QUOTES}
_JSON_ESCAPED = '"\\/bfnrtu'


@dataclass(frozen=True, slots=True)
class _Shape:
    """The fixed texts of a call in the layouts `named` and `parameters`, without the spaces around them.

    `name_end` follows the name and what else stands beside it, which `name_rest` matches; if it is empty, `after_name`
    are the texts that may follow. `end` stands behind the arguments. `key_end` is the first word after a key,
    `after_key` the others, and `attribute_end` follows the attribute that says whether the value is a text.
    `value_ends` end a text: the last of them, `value_end`, or the same after a line end that is not part of the text.
    """

    before_name: str
    name_end: str
    name_rest: re.Pattern[str]
    after_name: _Markers
    end: str
    joiner: str
    before_key: str
    key_end: str
    after_key: str
    attribute_end: str
    value_end: str
    value_ends: _Markers
    drops_newlines: bool

    @classmethod
    def of(cls, tools: ToolFormat) -> _Shape:
        before_name, after_name, end = tools.call_parts
        before_key, after_key, after_value = tools.parameter_parts
        *beside_name, name_end = pieces(after_name)
        beside = "".join(PLACEHOLDERS.get(piece, re.escape(piece)) for piece in beside_name)
        key_end, *attribute = pieces(after_key)
        first, *others = key_end.split()
        value_end, drops_newlines = after_value.strip(), after_key.endswith("\n")
        return cls(
            before_name.strip(),
            name_end.strip(),
            re.compile(rf"\s*{beside}\Z" if beside else r"(?!)"),
            _Markers(text for text in (before_key.strip(), end.strip() or tools.end.strip()) if text),
            end.strip(),
            tools.joiner.strip(),
            before_key.strip(),
            first,
            " ".join(others),
            attribute[-1].strip() if attribute else "",
            value_end,
            _Markers((f"\n{value_end}", value_end) if after_value.startswith("\n") else (value_end,)),
            drops_newlines,
        )


def _num_held(text: str, marker: str, start: int) -> int:
    """Returns the length of the longest suffix of `text[start:]` that is a proper prefix of a marker."""
    most = min(len(marker) - 1, len(text) - start)
    return next((size for size in range(most, 0, -1) if text.endswith(marker[:size])), 0)


def _is_json(text: str) -> bool:
    if nests_deeper(text.encode()):
        return False  # as arguments of the next turn it would be refused
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def merged(parts: Iterable[Part]) -> Iterator[Part]:
    """Yields the parts, with neighbours of one kind made one."""
    last: Part | None = None
    for part in parts:
        if isinstance(last, Content) and isinstance(part, Content):
            last = Content(last.text + part.text)
        elif isinstance(last, Reasoning) and isinstance(part, Reasoning):
            last = Reasoning(last.text + part.text)
        elif isinstance(last, Arguments) and isinstance(part, Arguments) and last.index == part.index:
            last = Arguments(last.index, last.text + part.text)
        else:
            if last is not None:
                yield last
            last = part
    if last is not None:
        yield last
