"""Marks the client's characters in a rendered conversation, to tell them from the template's.

The client's strings are rendered a second time with certain characters replaced, one for one, by stand-ins. If the
template treats both renderings alike, which is checked, a stand-in in the second shows a character of the client's in
the first. Stand-ins are characters that none of the client's strings has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

# Rare ideographs, which Python's notation prints unchanged too. A text that has all of them gets surrogates, which no
# text has, since it is UTF-8.
STAND_INS = (*range(0x20000, 0x20800), *range(0xD800, 0xE000))
Replace = Callable[[str], str]
Render = Callable[["TemplateInput"], str]


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """The input of a chat template. Every string in it is the client's, except a message's role, which is checked."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    variables: dict[str, Any]
    add_generation_prompt: bool = True

    def strings(self) -> Iterator[str]:
        """Yields every string of the client's, keys of objects included."""
        yield from _strings([self.messages, self.tools, self.variables])

    def replaced(self, in_values: Replace, in_keys: Replace) -> TemplateInput:
        """Returns a copy with the client's strings replaced. Names of fields and of variables stay."""
        messages = [
            {name: value if name == "role" else _replaced(value, in_values, in_keys) for name, value in message.items()}
            for message in self.messages
        ]
        tools = _replaced(self.tools, in_values, in_keys)
        variables = {name: _replaced(value, in_values, in_keys) for name, value in self.variables.items()}
        return TemplateInput(messages, tools, variables, self.add_generation_prompt)


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A rendered conversation. `marked` is as long as `text` and differs from it only in characters of the client's,
    in at least one character of each control token that contains client text. None: no control token contains client
    text."""

    text: str
    marked: str | None = None


class TemplateRefusal(Exception):
    """The template cannot be shown text in place of a control token."""


class Marker:
    """Marks the client's part of control tokens, for the templates of one model."""

    def __init__(self, tokens: Iterable[str], templates: Iterable[str], equivalents: Mapping[str, str]) -> None:
        """`equivalents` maps characters to the token character that the tokenizer's normalizer makes of them."""
        tokens = sorted(tokens, key=len, reverse=True)
        literals = [literal for template in templates for literal in template_literals(template)]
        self._any_token = re.compile("|".join(map(re.escape, tokens)) or "(?!)")
        delimiters = choose_delimiters(tokens, self._any_token.sub("", "\0".join(literals)))
        letters = {character for token in tokens for character in token if not character.isspace()}
        self._delimiters = delimiters | {c for c, meant in equivalents.items() if meant in delimiters}
        self._letters = letters | set(equivalents)
        self._has_delimiter = _any_of(self._delimiters)
        self._writes_parts = writes_parts(literals, tokens, delimiters)

    def mark(self, given: TemplateInput, text: str, render: Render) -> MarkedText:
        """Marks the client's part of `text`, which `render` has made of `given`. Passes on what `render` raises.

        Raises `TemplateRefusal` if the template treats stand-ins differently from the text of tokens.
        """
        strings = list(given.strings())
        if not self._writes_parts and not any(map(self._has_delimiter.search, strings)):
            return MarkedText(text)
        stand_ins = _StandIns(self._letters, strings)
        in_letters, in_delimiters = stand_ins.replacing(self._letters), stand_ins.replacing(self._delimiters)
        attempts = [given.replaced(in_delimiters, in_delimiters)]
        if self._writes_parts:
            # A token can have all its delimiters from the template, so letters count too. Templates look up fields by
            # keys.
            attempts.insert(0, given.replaced(in_letters, in_delimiters))
        rendered = ""
        for attempt in attempts:
            rendered = _rendered(render, attempt)
            if stand_ins.undone(rendered) == text:
                return MarkedText(text, stand_ins.inert(rendered))
        # The template decides by delimiters. It is shown all of them except those in whole tokens. Parts of tokens may
        # then have come together; the rendering without any delimiter of the client's shows that.
        in_tokens = self._replacing_tokens(in_delimiters)
        marked = _rendered(render, given.replaced(in_tokens, in_tokens))
        if stand_ins.undone(marked) != text or self._any_token.findall(marked) != self._any_token.findall(rendered):
            raise TemplateRefusal("the template treats the text of a control token in a way of its own")
        return MarkedText(text, stand_ins.inert(marked))

    def _replacing_tokens(self, replace: Replace) -> Replace:
        return lambda text: self._any_token.sub(lambda found: replace(found.group()), text)


class _StandIns:
    """Characters that stand for others in the strings of one conversation."""

    def __init__(self, characters: Iterable[str], strings: Iterable[str]) -> None:
        used = set[str]().union(*strings)
        free = (code for code in STAND_INS if chr(code) not in used)
        self._codes = dict(zip(sorted(characters), free, strict=False))
        self._originals = {code: character for character, code in self._codes.items()}
        inert = next(c for c in ("\ufffd", "\u25a1", "\u25cf", "\u25c6") if c not in self._codes)
        self._inert = dict.fromkeys(self._originals, inert)

    def replacing(self, characters: Iterable[str]) -> Replace:
        codes = {ord(character): self._codes[character] for character in characters}
        return lambda text: text.translate(codes)

    def undone(self, text: str) -> str:
        """Returns the text with the original characters in place of stand-ins."""
        return text.translate(self._originals)

    def inert(self, text: str) -> str:
        """Returns the text with characters that are in no token in place of stand-ins."""
        return text.translate(self._inert)


def _rendered(render: Render, given: TemplateInput) -> str:
    """Returns an empty string if the template raises: it already accepted the text itself."""
    try:
        return render(given)
    except Exception:
        return ""


def _any_of(characters: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, characters)) or "(?!)")


def template_literals(template: str) -> Iterator[str]:
    """Yields the texts that a template contains, also in its expressions; none for one that cannot be parsed."""
    # Parsed as `transformers` does.
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    try:
        for _, kind, value in list(environment.lex(template)):
            if kind == "data":
                yield value
            elif kind == "string":
                yield value[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape")
    except (TemplateSyntaxError, UnicodeDecodeError):
        return


def choose_delimiters(tokens: Iterable[str], other_text: str) -> frozenset[str]:
    """Returns a small set of characters that has one of every token and that the template's other text rarely has."""
    chosen: set[str] = set()
    left = [_delimiters_of(token) for token in tokens]
    while left:
        counts: dict[str, int] = {}
        for characters in left:
            for character in characters:
                counts[character] = counts.get(character, 0) + 1
        best = max(counts, key=lambda character: (counts[character], -other_text.count(character), character))
        chosen.add(best)
        left = [characters for characters in left if best not in characters]
    return frozenset(chosen)


def writes_parts(literals: Iterable[str], tokens: Iterable[str], delimiters: frozenset[str]) -> bool:
    """Returns whether a template writes a delimiter of a token apart from the whole token, so that text between or
    beside its own can complete it."""
    beginnings = {token[:n] for token in tokens for n in range(1, len(token)) if delimiters & set(token[:n])}
    ends = {token[-n:] for token in tokens for n in range(1, len(token)) if delimiters & set(token[-n:])}
    longest = max(map(len, beginnings | ends), default=0)
    for literal in literals:
        sizes = range(1, min(longest, len(literal)) + 1)
        if any(literal[-n:] in beginnings or literal[:n] in ends for n in sizes):
            return True
        if delimiters & set(literal) and any(literal in token and literal != token for token in tokens):
            return True
    return False


def _delimiters_of(token: str) -> frozenset[str]:
    characters = {character for character in token if not character.isspace()}
    return frozenset({c for c in characters if not c.isalnum() and c not in "_\u2581"} or characters)


def _strings(value: Any) -> Iterator[str]:
    """Yields all strings of a value. Not recursive: deep nesting must not raise before it is known to matter."""
    left = [value]
    while left:
        match left.pop():
            case str() as text:
                yield text
            case dict() as fields:
                left += fields.keys()
                left += fields.values()
            case list() as elements:
                left += elements


def _replaced(value: Any, in_values: Replace, in_keys: Replace) -> Any:
    match value:
        case str():
            return in_values(value)
        case dict():
            return {in_keys(name): _replaced(field, in_values, in_keys) for name, field in value.items()}
        case list():
            return [_replaced(element, in_values, in_keys) for element in value]
        case _:
            return value
