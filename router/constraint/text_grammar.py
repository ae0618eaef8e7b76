"""Grammars of texts within a call: a client's Lark, written for the place where a format of calls has the text.

The compiler divides a text into lexemes, each as long as possible, and looks ahead one byte. JSON writes a line end or
a quotation mark as two characters, so one byte does not show whether a lexeme goes on. Therefore the rules of a
grammar, unless they refer to themselves, become one terminal, which the compiler treats as one regular expression. A
grammar whose rules refer to themselves stays as it is, if none of its texts has a character that the place changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import llguidance

# Characters that JSON escapes in a string.
JSON_SPECIAL = '"\\' + "".join(map(chr, range(0x20)))
_PLAIN = r'[^"\\\x00-\x1f]'
# `%import common.NAME` of Lark, as the compiler has them.
COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "DECIMAL": r"([0-9]+\.[0-9]*)|(\.[0-9]+)",
    "FLOAT": r"([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+",
    "SIGNED_FLOAT": r"[+-]?(([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)",
    "NUMBER": r"[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+",
    "SIGNED_NUMBER": r"[+-]?([0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)",
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}

# Of what is neither a name nor a text.
_SUPPORTED = frozenset("|()[]{},*+?~&")
_STRING = r'"(?:[^"\\\n]|\\.)*"'
_TOKEN = re.compile(
    rf"(?P<range>{_STRING}[ \t]*\.\.[ \t]*{_STRING})|(?P<string>{_STRING}i?)|(?P<regex>/(?:[^/\\\n]|\\.)+/[imslux]*)"
    r"|(?P<skipped>(?://|#)[^\n]*|[ \t\r]+)|(?P<line>\n)|(?P<name>[!?]*_?[A-Za-z][A-Za-z0-9_\-]*)|(?P<word>%[a-z]+)"
    r"|(?P<number>[0-9]+(?:\.\.[0-9]+)?)|(?P<arrow>->)|(?P<other>.)",
    re.DOTALL,
)
_IMPORT = re.compile(r"common (?:\. (?P<one>\w+)(?: -> (?P<alias>\w+))?|(?:\. )?\( (?P<several>\w+(?: , \w+)*) \))")
_CODE = r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[xuU]\{[0-9A-Fa-f]+\}|[pP](?:\{[^}]*\}|.)|.)"
_REGEX_PART = re.compile(rf"(?P<flags>\(\?(?P<set>[a-zA-Z\-]+)(?P<end>[:)]))|(?P<code>{_CODE})|(?P<other>.)", re.DOTALL)
_REGEX_GROUP = re.compile(r"\((?:\?(?:P?<\w+>|:))?")
_IN_CLASS = re.compile(rf"\[\^?\]?|{_CODE}|.", re.DOTALL)
# Assertions, of which the compiler says that it has none.
_ASSERTIONS = frozenset("bBAzZG<>")


class TextGrammarError(Exception):
    """A grammar that cannot be enforced where it stands. The text completes a sentence that begins with its field."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str


def text_grammar(grammar: str, ending: str = "", written: str = "") -> str:
    """Returns the grammar of a text as it stands between the quotation marks of a string of JSON or, with an ending
    that no text has, of the text as it is and the beginning `written` of the ending. Raises `TextGrammarError`."""
    source = _Source(grammar)
    if source.recursive is None:
        return "\n".join(source.flat(ending, written))
    special = ending[:1] + ending.strip()[:1] if ending else JSON_SPECIAL
    if any(source.has(special)):
        place = f"text before {ending.strip()}" if ending else "JSON"
        raise TextGrammarError(
            f"has the rule {source.recursive}, which refers to itself, and characters that are special in {place}, "
            "where the format of the model's calls has the text; such a grammar cannot be enforced for this model"
        )
    return source.within(written)


class _Source:
    """A grammar as its definitions: the tokens of each rule and terminal, of imports, and of what is ignored."""

    def __init__(self, grammar: str) -> None:
        self._text = grammar
        self._rules: dict[str, list[_Token]] = {}
        self._ignored: list[list[_Token]] = []
        for statement in _statements(grammar):
            self._read(statement)
        if "start" not in self._rules:
            raise TextGrammarError("has no rule start")
        for name, body in (*self._rules.items(), *(("%ignore", one) for one in self._ignored)):
            for token in body:
                if token.kind in ("word", "other") and token.text not in _SUPPORTED:
                    raise TextGrammarError(f"has {token.text} in the rule {name}, which is not supported")
            for used in _names(body):
                if used not in self._rules:
                    raise TextGrammarError(f"has the rule {name}, which refers to {used}, which it does not define")
        self._leave_out_unused()
        self.recursive = self._recursive()

    def _read(self, tokens: list[_Token]) -> None:
        first = tokens[0]
        if first.kind == "word":
            rest = " ".join(token.text for token in tokens[1:])
            if first.text == "%ignore":
                self._ignored.append(tokens[1:])
            elif first.text == "%import" and (found := _IMPORT.fullmatch(rest)):
                for name in (found["several"] or found["one"]).split(" , "):
                    if name not in COMMON:
                        raise TextGrammarError(f"imports common.{name}, which is not supported")
                    self._rules[found["alias"] or name] = [_Token("regex", f"/{COMMON[name]}/")]
            else:
                raise TextGrammarError(f"has {first.text} {rest[:40]}, which is not supported")
            return
        colon = next((at for at, token in enumerate(tokens) if token.text == ":"), None)
        attributes = [token.text for token in tokens[1:colon]]
        is_plain = not attributes or (attributes[0] == "." and len(attributes) == 2)
        if first.kind != "name" or colon is None or not is_plain:
            shown = " ".join(token.text for token in tokens[:4])
            raise TextGrammarError(
                f"has the definition {json.dumps(shown[:60], ensure_ascii=False)}, which is not supported"
            )
        self._rules[_plain_name(first.text)] = _without_aliases(tokens[colon + 1 :])

    def _leave_out_unused(self) -> None:
        used = {"start"}
        unread = ["start", *(name for body in self._ignored for name in _names(body))]
        while unread:
            name = unread.pop()
            used.add(name)
            unread += [one for one in _names(self._rules[name]) if one not in used]
        self._rules = {name: body for name, body in self._rules.items() if name in used}

    def _recursive(self) -> str | None:
        """Returns the name of a rule that refers to itself, directly or not."""
        finished: set[str] = set()
        for start in self._rules:
            path: list[tuple[str, Iterator[str]]] = [(start, _names(self._rules[start]))]
            open_names = {start}
            while path and start not in finished:
                name, uses = path[-1]
                used = next((one for one in uses if one not in finished), None)
                if used is None:
                    finished.add(name)
                    open_names.discard(name)
                    path.pop()
                elif used in open_names:
                    return used
                else:
                    open_names.add(used)
                    path.append((used, _names(self._rules[used])))
        return None

    def has(self, special: str) -> Iterator[bool]:
        """Yields whether each text and regular expression of the grammar can have a special character."""
        for body in (*self._rules.values(), *self._ignored):
            for token in body:
                match token.kind:
                    case "string":
                        yield any(one in special for one in _text_of(token))
                    case "range" | "regex":
                        yield any(found for _, found in _parts(_regex_of(token), special))

    def within(self, written: str) -> str:
        """Returns the grammar as it is, with the beginning of the ending behind it."""
        renamed = re.sub(
            r"^([!?]*)start\b(?=[ \t]*:)", r"\1text-before-ending", self._text, count=1, flags=re.MULTILINE
        )
        return f"start: text-before-ending {json.dumps(written)}\n{renamed}" if written else self._text

    def flat(self, ending: str, written: str) -> Iterator[str]:
        """Yields the lines of the grammar with one terminal of the text."""
        is_json = not ending
        for name, body in self._rules.items():
            # Between the lexemes of rules, whose names are in lower case.
            ignores = bool(self._ignored) and name[:2].strip("_")[:1].islower()
            yield f"{_terminal(name)}: {_written(body, is_json=is_json, ignores=ignores)}"
        whole = _terminal("start")
        if self._ignored:
            yield f"IGNORED: {' | '.join(f'({_written(one, is_json=is_json)})' for one in self._ignored)}"
            whole = f"IGNORED* {whole}"
        if is_json:
            yield f"TEXT: {whole}"
        else:
            tag = "".join(map(_escaped, ending.strip()))
            # The parser ends the text at the first tag.
            # It has none itself, or ends in the only one.
            tags = f"{tag}.*{tag}" if written == ending else tag
            whole = f"{whole} {json.dumps(written)}" if written else whole
            yield f"TEXT: ({whole}) & /(?s:.*)/ & ~/(?s:.*{tags}.*)/"
        yield "start: TEXT"


def _statements(grammar: str) -> Iterator[list[_Token]]:
    """Yields the tokens of each definition. It goes on in lines that begin with `|`, and within brackets."""
    tokens: list[_Token] = []
    depth, line_ended = 0, False
    for found in _TOKEN.finditer(grammar):
        kind, text = found.lastgroup or "", found[0]
        if kind == "skipped":
            continue
        if kind == "line":
            line_ended = depth == 0
            continue
        if line_ended and text != "|" and tokens:
            yield tokens
            tokens = []
        line_ended = False
        depth += (text in "([{") - (text in ")]}") if kind == "other" else 0
        tokens.append(_Token(kind, text))
    if tokens:
        yield tokens


def _without_aliases(tokens: list[_Token]) -> list[_Token]:
    kept: list[_Token] = []
    after_arrow = False
    for token in tokens:
        if token.kind == "arrow" or after_arrow:
            after_arrow = token.kind == "arrow"
        else:
            kept.append(token)
    return kept


def _names(tokens: list[_Token]) -> Iterator[str]:
    return (_plain_name(token.text) for token in tokens if token.kind == "name")


def _plain_name(name: str) -> str:
    return name.lstrip("!?")


def _terminal(name: str) -> str:
    """Returns the name of the terminal that a rule or terminal becomes."""
    is_rule = name.strip("_")[:1].islower()
    return f"{'RULE' if is_rule else 'TERM'}_{name.upper()}"


def _text_of(token: _Token) -> str:
    """Returns the text of a string, which has JSON's escapes."""
    try:
        text = json.loads(token.text.removesuffix("i"))
    except ValueError:
        raise TextGrammarError(f"has the string {token.text[:40]}, which is not one of JSON") from None
    assert isinstance(text, str)
    return text


def _regex_of(token: _Token) -> str:
    """Returns the regular expression of a token."""
    if token.kind == "range":
        first, last = (re.escape(_text_of(_Token("string", one))) for one in re.findall(_STRING, token.text))
        return f"[{first}-{last}]"
    if token.kind == "string":
        return "".join(_escaped(one) for one in _text_of(token))
    end = token.text.rindex("/")
    flags = token.text[end + 1 :]
    return f"(?{flags}){token.text[1:end]}" if flags else token.text[1:end]


def _escaped(character: str) -> str:
    return f"\\x{ord(character):02x}" if character < " " else re.escape(character).replace("/", r"\/")


def _written(tokens: list[_Token], *, is_json: bool, ignores: bool = False) -> str:
    """Returns a definition as one of terminals. With `ignores`, what is ignored may follow each lexeme."""
    parts: list[str] = []
    at = 0
    while at < len(tokens):
        token = tokens[at]
        is_complement = token.text == "~" and not (parts and at and _ends_atom(tokens[at - 1]))
        if is_complement and is_json:
            end = _atom_end(tokens, at + 1)
            parts.append(
                f"(/(?:{_PLAIN}|{_codes(JSON_SPECIAL)})*/ & ~({_written(tokens[at + 1 : end], is_json=True)}))"
            )
            at = end
            continue
        parts.append(_atom(token, is_json=is_json, ignores=ignores))
        at += 1
    return " ".join(parts)


def _atom(token: _Token, *, is_json: bool, ignores: bool) -> str:
    match token.kind:
        case "name":
            name = _plain_name(token.text)
            written, is_lexeme = _terminal(name), not name.strip("_")[:1].islower()
        case "string" if not token.text.endswith("i"):
            text = _text_of(token)
            written, is_lexeme = json.dumps(_in_json(text) if is_json else text, ensure_ascii=False), True
        case "string" | "range" | "regex":
            regex = f"(?i){_regex_of(token)}" if token.kind == "string" else _regex_of(token)
            written = f"/{''.join(part for part, _ in _parts(regex, JSON_SPECIAL)) if is_json else regex}/"
            is_lexeme = True
        case _:
            return token.text
    return f"({written} IGNORED*)" if ignores and is_lexeme else written


def _ends_atom(token: _Token) -> bool:
    return token.kind in ("name", "string", "range", "regex") or token.text in (")", "]", "*", "+", "?", "}")


def _atom_end(tokens: list[_Token], at: int) -> int:
    """Returns where the atom that begins at a token ends."""
    depth = 0
    for number in range(at, len(tokens)):
        depth += (tokens[number].text in ("(", "[")) - (tokens[number].text in (")", "]"))
        if depth == 0:
            return number + 1
    raise TextGrammarError("has a bracket that does not end")


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _parts(regex: str, special: str) -> Iterator[tuple[str, bool]]:
    """Yields the parts of a regular expression, written for JSON, each with whether it can match a special
    character."""
    flags = ""
    # Those around the groups that are open.
    outer: list[str] = []
    at = 0
    while at < len(regex):
        found = _REGEX_PART.match(regex, at)
        assert found is not None
        part = found[0]
        if found["flags"]:
            if set(found["set"]) & set("xR"):
                raise TextGrammarError(f"has the flags {part}, which are not supported")
            if found["end"] == ":":
                outer.append(flags)
            flags = _with_flags(flags, found["set"])
            yield part, False
        elif part == "(":
            group = _REGEX_GROUP.match(regex, at)
            assert group is not None
            outer.append(flags)
            part = group[0]
            yield part, False
        elif part == ")":
            flags = outer.pop() if outer else flags
            yield part, False
        elif part in "|?*+^${}" or (found["code"] and part[1] in _ASSERTIONS):
            yield part, False
        else:
            if part == "[":
                part = regex[at : _class_end(regex, at)]
            matched = _ascii_of(f"(?{flags}:{part})" if flags else part)
            yield _quoted(part, matched, flags), bool(set(matched) & set(special))
        at += len(part)


def _with_flags(flags: str, change: str) -> str:
    added, _, removed = change.partition("-")
    return "".join(sorted((set(flags) | set(added)) - set(removed)))


def _class_end(regex: str, at: int) -> int:
    depth = 0
    while at < len(regex):
        found = _IN_CLASS.match(regex, at)
        assert found is not None
        depth += found[0].startswith("[") - (found[0] == "]")
        at = found.end()
        if depth == 0:
            return at
    raise TextGrammarError("has a class in a regular expression that does not end")


def _quoted(part: str, matched: str, flags: str) -> str:
    """Returns what matches the same characters in JSON. `matched` are the ASCII characters of a part."""
    escaped = "".join(one for one in matched if one in JSON_SPECIAL)
    if not escaped:
        return part
    if len(matched) == 1 and part[0] != "[" and part[:2] not in (r"\p", r"\P"):
        return _codes(escaped)
    if part == ".":
        part = r"[\x{0}-\x{10FFFF}]" if "s" in flags else r"[^\n]"
    return f"(?:[{part}&&{_PLAIN}]|{_codes(escaped)})"


def _codes(characters: str) -> str:
    """Returns an expression of the escapes of characters, whose letters have one case."""
    return f"(?-i:{'|'.join(re.escape(_in_json(one)) for one in characters)})"


@lru_cache(1024)
def _ascii_of(part: str) -> str:
    """Returns the ASCII characters that a part of a regular expression matches. Raises `TextGrammarError`."""
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(
        tokenizer, json.dumps({"grammars": [{"lark_grammar": f"start: /{part}/"}]}), log_level=0
    )
    if matcher.is_error():
        raise TextGrammarError(f"has {json.dumps(part[:60], ensure_ascii=False)}, which is no regular expression here")
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    return "".join(chr(byte) for byte in range(128) if mask >> byte & 1)
