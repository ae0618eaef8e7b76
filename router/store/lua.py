"""The library of Redis Functions with the Lua scripts, composed once from their sources.

It has one function per script. Its Lua functions are created when it is loaded, those of `scripts/shared` once for all
scripts. Lua allows 200 local variables at a time, so a function that only one script or only one other function needs
is put into a block with it. Variables that a file sets at its top level before its last function are read by Lua
functions, so they are variables of the library. Every call sets them first. A table that starts empty is emptied for
the next call, unless its name begins with `kept_`. Code after the last function remains local to the call. A line
`--@flags` lists the flags of the script's function.

- Constants and keys (`local NAME = number`, `KEYS[…]` or `ARGV[…]`) are inlined where they are used.
- For each line `--@record name fields` functions `pack_name` and `unpack_name` are generated: `field` is a number,
  `field?` a boolean, `field$` a string of less than 64 KiB, `field[n]` n numbers.

A line `--@array name as variables` makes the record an array. For these variables `variable.field` is replaced by
`variable[number]`, and `variable{field = value, …}` by a table in the order of the fields. Such a table takes a quarter
of the memory. The names after `with` are fields that are not packed; unpacking sets them to false.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from inflight.router.store.codec import ARGUMENTS, Arguments

_CONSTANT = re.compile(r"^local ([A-Z][A-Z_]*) = ([\d.e]+|(?:KEYS|ARGV)\[\d+\])\n", re.MULTILINE)
_FUNCTION = re.compile(r"^local function (\w+)\((?:[^\n]* end\n|.*?^end\n)", re.MULTILINE | re.DOTALL)
_FLAGS = re.compile(r"^--@flags ([\w -]+)\n", re.MULTILINE)
_LOCAL = re.compile(r"^local (\w+(?:,\s*\w+)*)(\s*=)?", re.MULTILINE)
_TABLES = re.compile(r"^(\w+(?:, \w+)*) = \{\}(?:, \{\})*\n", re.MULTILINE)
_RECORD = re.compile(r"^--@record (\w+) ((?:[^\n]*\\\n)*[^\n]*)\n", re.MULTILINE)
_ARRAY = re.compile(r"^--@array (\w+) as ([\w ]+?)(?: with ([\w ]+))?\n", re.MULTILINE)
_COMMENT = re.compile(r"[ ]*--[^\n]*")
_STRING_OR_WORD = re.compile(r"'[^']*'|\w+")


def compose_library(shared: str, scripts: Mapping[str, str]) -> Library:
    """Returns the library of these scripts. The names of the library and of its functions contain the hash of its text,
    so that routers of different versions can use one Redis."""
    arrays = _arrays(shared)
    text = _without_comments(shared, arrays)
    constants = dict(_CONSTANT.findall(text))
    names, per_call, functions, rest = _parts(_CONSTANT.sub("", text))
    assert not rest.strip(), "the shared parts end with a function"
    own = {name: _without_comments(source, arrays) for name, source in scripts.items()}
    needed = {name: _reached(source, _functions(functions)) for name, source in own.items()}
    num_users = Counter(one for names_needed in needed.values() for one in names_needed)
    common = {one for one, number in num_users.items() if number > 1} | _reached(per_call, _functions(functions))
    own = {name: _only(functions, needed[name] - common) + source for name, source in own.items()}
    functions = _scoped(_only(functions, common), per_call + "".join(own.values()))
    begin = f"local function begin_call()\n{per_call}last_call_ms = NOW\nend\n"
    body = f"local KEYS, ARGV, last_call_ms\nlocal {', '.join(names)}\n{_CLEARED}" + _finished(
        _GUARDED + functions + begin, constants
    )
    flags = {
        name: [flag for line in _FLAGS.findall(source) for flag in line.split()] for name, source in scripts.items()
    }
    body += "".join(_registration(name, source, flags[name], constants) for name, source in own.items())
    body += _FORGET + _IDLE
    digest = hashlib.sha256(body.encode()).hexdigest()[:16]
    return Library(digest, f"#!lua name={LIBRARY_PREFIX}{digest}\n" + body.replace("@digest@", digest))


# Empties a table for the next call. A small table is reused, because creating tables is most of the cost of a call.
_CLEARED = """local function cleared(used)
local count = 0
for key in next, used or {} do
used[key], count = nil, count + 1
end
return used and count <= 32 and used or {}
end
"""

# Runs a call. The library keeps records between calls. It compares the version in the pool's state to decide whether
# they still equal the records in Redis. A call that fails half-way has not increased that version, so it is increased
# here. The version is the last field of the state.
_GUARDED = """local function guarded(run)
local done, result = pcall(run)
if done then
return result
end
local text = redis.pcall('GET', STATE)
if type(text) == 'string' and #text >= 8 then
redis.pcall('SETRANGE', STATE, #text - 8, struct.pack('<d', struct.unpack('<d', text, #text - 7) + 1))
end
error(result, 0)
end
"""

# Returns the milliseconds since a function of the library was last called. The time of that call is unknown after a
# restart or a failover; then it counts from the first query.
_IDLE = """redis.register_function{function_name='inflight_idle_ms_@digest@', flags={'no-writes'}, callback=function()
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
last_call_ms = last_call_ms or now
return now - last_call_ms
end}
"""

# Drops its keys. A router's user in Redis may call PEXPIRE, but not DEL.
_FORGET = """redis.register_function('inflight_forget_@digest@', function(keys)
for _, key in ipairs(keys) do
redis.call('PEXPIRE', key, 0)
end
end)
"""


def _registration(name: str, text: str, flags: Sequence[str], constants: Mapping[str, str]) -> str:
    """Returns Lua code that registers a script, without comments, as a function of the library."""
    constants = {**constants, **dict(_CONSTANT.findall(text))}
    names, per_call, functions, main = _parts(_CONSTANT.sub("", text))
    functions = _scoped(functions, per_call + main)
    declared = f"local {', '.join(names)}\n" if names else ""
    return _finished(
        f"do\n{declared}{functions}local function begin()\n{per_call}end\n"
        f"local function run()\nbegin_call()\nbegin()\n{main}end\n"
        f"redis.register_function{{function_name='inflight_{name}_@digest@', "
        f"flags={{{', '.join(repr(flag) for flag in flags)}}}, callback=function(keys, args)\n"
        f"KEYS, ARGV = keys, args\nreturn guarded(run)\nend}}\nend\n",
        constants,
    )


def _parts(text: str) -> tuple[list[str], str, str, str]:
    """Splits a text without constants. Returns the names of the variables that it declares before its last function,
    the code there that sets them, its functions, and the code after them."""
    functions = list(_FUNCTION.finditer(text))
    end = functions[-1].end() if functions else 0
    head = _FUNCTION.sub("", text[:end])
    names = [name.strip() for match in _LOCAL.finditer(head) for name in match[1].split(",")]
    per_call = _LOCAL.sub(lambda match: match[0].removeprefix("local ") if match[2] else f"{match[1]} = nil", head)
    per_call = _TABLES.sub(lambda match: _cleared([name.strip() for name in match[1].split(",")]), per_call)
    return names, per_call, "".join(match[0] for match in functions), text[end:]


def _cleared(tables: Sequence[str]) -> str:
    """Returns Lua code that empties these tables for a call. Those whose names begin with `kept_` stay as they are."""
    return "".join(
        f"{name} = {name} or {{}}\n"
        if name.startswith("kept_")
        else f"if not {name} or next({name}) ~= nil then {name} = cleared({name}) end\n"
        for name in tables
    )


def _arrays(shared: str) -> Mapping[str, Mapping[str, int]]:
    """Returns, for each variable that holds a record as an array, the array index of each field. The variables of a
    record include its name."""
    fields = {match[1]: [_name(one) for one in _fields(match[2])] for match in _RECORD.finditer(shared)}
    return {
        variable: {field: place for place, field in enumerate([*fields[match[1]], *(match[3] or "").split()], 1)}
        for match in _ARRAY.finditer(shared)
        for variable in match[2].split()
    }


def _name(field: str) -> str:
    """Returns the name of a field, without its type."""
    return field.partition("[")[0].rstrip("?$")


def _fields(text: str) -> list[str]:
    """Returns the fields of a line `--@record`."""
    return text.replace("\\\n--", "").split()


def _without_comments(text: str, arrays: Mapping[str, Mapping[str, int]]) -> str:
    text = _RECORD.sub(lambda match: _record(match[1], _fields(match[2]), arrays.get(match[1])), text)
    text = _COMMENT.sub("", text)
    for variable, places in arrays.items():
        for match in reversed(list(re.finditer(rf"\b{variable}\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}", text))):
            text = text[: match.start()] + _in_order(match[1], places) + text[match.end() :]
        for match in reversed(list(re.finditer(rf"\b{variable}\.(\w+)", text))):
            text = f"{text[: match.start()]}{variable}[{places[match[1]]}]{text[match.end() :]}"
    return text


def _in_order(entries: str, places: Mapping[str, int]) -> str:
    """Returns Lua code for a table with the values of the entries `field = value, …` at the indices of their fields."""
    pairs = (entry.split("=", 1) for entry in re.split(r",(?![^({]*[)}])", entries) if entry.strip())
    values = {field.strip(): value.strip() for field, value in pairs}
    assert values.keys() == places.keys(), "the constructor of an array has all fields"
    return "{" + ", ".join(values[field] for field in places) + "}"


def _finished(text: str, constants: Mapping[str, str]) -> str:
    """Returns the text with the constants inlined and without empty lines."""
    text = _STRING_OR_WORD.sub(lambda match: constants.get(match[0], match[0]), text)
    return "\n".join(line for line in text.splitlines() if line.strip()) + "\n"


def _functions(text: str) -> dict[str, str]:
    return {match[1]: match[0] for match in _FUNCTION.finditer(text)}


def _reached(text: str, functions: dict[str, str]) -> set[str]:
    """Returns the functions that the text uses, directly or indirectly."""
    seen: set[str] = set()
    waiting = [text]
    while waiting:
        used = (functions.keys() & set(_STRING_OR_WORD.findall(waiting.pop()))) - seen
        seen |= used
        waiting += (functions[name] for name in used)
    return seen


def _only(functions: str, names: Set[str]) -> str:
    """Returns those functions, in their order."""
    return "".join(body for name, body in _functions(functions).items() if name in names)


def _scoped(text: str, users: str) -> str:
    """Returns these functions, each in a block with the functions that only it needs. `users` is other code that uses
    functions of the text."""
    for name in reversed(_functions(text)):
        text, body, nested = _separated(name, text, users)
        if nested:
            text = text.replace(body, f"local {name}\ndo\n{nested}{body.removeprefix('local ')}end\n")
    return text


def _separated(name: str, text: str, users: str) -> tuple[str, str, str]:
    """Returns three texts: `text` without the functions that only `name` needs, the function `name` or '', and the
    functions that were removed."""
    functions = _functions(text)
    if name not in functions:
        return text, "", ""
    others = {other: body for other, body in functions.items() if other != name}
    only_here = functions.keys() - _reached(_FUNCTION.sub("", text) + users, others) - {name}
    nested = "".join(body for other, body in functions.items() if other in only_here)
    text = _FUNCTION.sub(lambda match: "" if match[1] in only_here else match[0], text)
    return text, functions[name], nested


def _record(name: str, fields: list[str], places: Mapping[str, int] | None) -> str:
    """Returns Lua code that packs the record and unpacks it into a table created at its full size. `places` is set if
    the record is an array. Then the code also has `named_…`, which unpacks it into a table with the fields' names."""
    parts = [_field(i, field) for i, field in enumerate(fields)]
    codes, values, variables, entries = (",".join(column) for column in zip(*parts, strict=True))
    in_order = ""
    if places is not None:
        values = re.sub(r"record\.(\w+)", lambda match: f"record[{places[match[1]]}]", values)
        unpacked_values = [entry.partition("=")[2] for _, _, _, entry in parts]
        in_order = ",".join(unpacked_values + ["false"] * (len(places) - len(fields)))
    layout = "<" + codes.replace(",", "")
    unpacked = f"  local {variables} = struct.unpack('{layout}', text)\n"
    return (
        f"local function pack_{name}(record)\n  return struct.pack('{layout}', {values})\nend\n"
        f"local function unpack_{name}(text)\n{unpacked}"
        f"  return {{{in_order or entries}}}\nend\n"
    ) + (f"local function named_{name}(text)\n{unpacked}  return {{{entries}}}\nend\n" if in_order else "")


def _field(index: int, field: str) -> tuple[str, str, str, str]:
    """Returns, for one field, the format code for `struct`, the expression to pack, the variables to unpack into, and
    the table entry."""
    name, variable = field.rstrip("?$"), f"v{index}"
    if field.endswith("?"):
        return "b", f"record.{name} and 1 or 0", variable, f"{name}={variable}==1"
    if field.endswith("$"):
        return "Hc0", f"#record.{name},record.{name}", variable, f"{name}={variable}"
    if field.endswith("]"):
        name, _, count = name.rstrip("]").partition("[")
        numbers = range(1, int(count) + 1)
        names = ",".join(f"{variable}_{i}" for i in numbers)
        return "d" * int(count), ",".join(f"record.{name}[{i}]" for i in numbers), names, f"{name}={{{names}}}"
    return "d", f"record.{name}", variable, f"{name}={variable}"


def arguments_source() -> str:
    """Returns Lua code with the functions `read_…`. Each reads the arguments of one item of a script, from the argument
    at `at`, into the fields of a table, and returns where the next item begins."""
    return "".join(_reader(name, arguments) for name, arguments in ARGUMENTS.items())


def _reader(script: str, arguments: Arguments[...]) -> str:
    """Returns the Lua code of one of these functions."""
    places = [f"ARGV[at + {place}]" if place else "ARGV[at]" for place in range(len(arguments.own) + 1)]
    own = {
        field.rstrip("?$"): place
        if field.endswith("$")
        else f"{place} == '1'"
        if field.endswith("?")
        else f"tonumber({place})"
        for field, place in zip(arguments.own, places, strict=False)
    }
    code = f"local function read_{script}(into, at)\n  {_assigned(own)} = {', '.join(own.values())}\n"
    if arguments.packed:
        code += f"  {_assigned(arguments.packed)} = struct.unpack('{arguments.layout}', {places[len(own)]})\n"
    return code + f"  return at + {len(own) + bool(arguments.packed)}\nend\n"


def _assigned(fields: Iterable[str]) -> str:
    return ", ".join(f"into.{field}" for field in fields)


SOURCES = Path(__file__).with_name("scripts")
SHARED = ("clock", "records", "owners", "lengths", "tenants", "estimates", "adapters", "states", "places", "board")
NAMES = (
    "submit",
    "settle",
    "report",
    "cancel",
    "hand_back",
    "adopt",
    "absolve",
    "verify",
    "reap",
    "renew",
    "board",
    "explain",
    "snapshot",
    "rates",
)


class ScriptCaller(Protocol):
    """The part of a Redis client that runs scripts."""

    async def execute_command(self, *args: Any) -> Any:
        """Sends one command and returns its reply."""


LIBRARY_PREFIX = "inflight_"


@dataclass(frozen=True, slots=True)
class Library:
    """A library of Redis Functions. `digest` is part of its name and of the names of its functions."""

    digest: str
    source: str

    @property
    def name(self) -> str:
        """Returns the library's name."""
        return LIBRARY_PREFIX + self.digest

    def function(self, script: str) -> str:
        """Returns the name of a script's function."""
        return f"{LIBRARY_PREFIX}{script}_{self.digest}"


@functools.cache
def load_scripts(clock: str | None = None) -> Library:
    """Returns the library of all scripts, composed once per process and clock. A test that controls time passes the Lua
    source of its own `now_ms` as `clock`."""
    return compose_scripts(shared_source(clock))


def compose_scripts(shared: str) -> Library:
    """Returns the library of all scripts, composed with this shared source. An experiment passes a modified source."""
    return compose_library(shared, {name: _read(name) for name in NAMES})


def shared_source(clock: str | None = None) -> str:
    """Returns the shared source of all scripts."""
    return (
        (clock or _read("shared/clock")) + arguments_source() + "".join(_read(f"shared/{part}") for part in SHARED[1:])
    )


def _read(name: str) -> str:
    return (SOURCES / f"{name}.lua").read_text(encoding="utf-8")


if __name__ == "__main__":
    print(load_scripts().source, end="")
