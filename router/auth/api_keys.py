"""API keys: what the file of keys says, and whose a presented key is.

Pure: TOML text in, frozen values out, or a `ContentError` that names the line and the key of everything that is wrong.

    [[key]]
    id = "acme-1"                         # for people and logs; no secret
    hash = "sha256:9f86…"                 # of the key; the key itself stands nowhere
    tenant = "acme"
    classes = ["standard", "batch"]       # all, where the line is left out
    models = ["SmolLM2-135M-Instruct"]    # all
    operator = false                      # may act for, and look at, every tenant
    expires = 2027-01-01T00:00:00Z        # never
    disabled = false

A hash that is slow on purpose (bcrypt, argon2) protects passwords, which people choose and which can be guessed. A key
of 256 random bits cannot be guessed at any speed, so SHA-256 is enough and costs a request nothing. That a key was weak
cannot be seen from its hash: only keys that are too short are refused, when they are presented.
"""

from __future__ import annotations

import hashlib
import hmac
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from inflight.v1 import types_pb2
from router.auth.caller import Caller
from router.config.file_problems import ContentError, Problem
from router.config.tenants import TENANT_NAME, is_tenant_name
from router.config.toml_lines import Path, error_line, key_lines, line_of

MIN_KEY_CHARACTERS = 32
MAX_KEYS = 10_000
HASH_PREFIX = "sha256:"
FIELDS = ("id", "hash", "tenant", "classes", "models", "operator", "expires", "disabled")

CLASSES: dict[str, types_pb2.PriorityClass] = {
    "interactive": types_pb2.PRIORITY_CLASS_INTERACTIVE,
    "standard": types_pb2.PRIORITY_CLASS_STANDARD,
    "batch": types_pb2.PRIORITY_CLASS_BATCH,
}


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One entry of the file. `expires_s` counts from 1970; None: never."""

    key_id: str
    digest: bytes
    caller: Caller
    expires_s: float | None = None
    is_disabled: bool = False

    def opens(self, now_s: float) -> bool:
        """Whether the key is good now."""
        return not self.is_disabled and (self.expires_s is None or now_s < self.expires_s)


def find_key(keys: Sequence[ApiKey], presented: str) -> ApiKey | None:
    """The entry of a key. Looks at every entry, in the same way and to the end, whichever it is."""
    if len(presented) < MIN_KEY_CHARACTERS:
        return None
    digest = hashlib.sha256(presented.encode()).digest()
    found: ApiKey | None = None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    return found


def parse_keys(source: str) -> tuple[ApiKey, ...]:
    """What the file says. Raises `ContentError`."""
    try:
        content = tomllib.loads(source)
    except (ValueError, RecursionError) as error:  # also numbers too long and nesting too deep for Python
        raise ContentError((Problem(error_line(error, source), f"is not TOML: {error}"),)) from None
    reader = _Reader(key_lines(source))
    keys = reader.keys(content)
    if reader.problems:
        raise ContentError(tuple(sorted(reader.problems, key=lambda problem: problem.line or 0)))
    return keys


class _Reader:
    """Reads entries into keys and collects what is wrong with them. Repeats no hash: it may be a key by mistake."""

    def __init__(self, lines: dict[Path, int]) -> None:
        self.problems: list[Problem] = []
        self._lines = lines

    def keys(self, content: dict[str, Any]) -> tuple[ApiKey, ...]:
        for name in content:
            if name != "key":
                self._wrong((name,), name, "is not known; a key is a table [[key]]")
        entries = content.get("key", [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            self._wrong(("key",), "key", "must be tables [[key]]")
            return ()
        if len(entries) > MAX_KEYS:
            self._wrong((), "key", f"there may be {MAX_KEYS} keys, there are {len(entries)}")
        keys = [self._key(("key", str(index)), entry) for index, entry in enumerate(entries)]
        self._refuse_repeated("id", [key.key_id for key in keys])
        self._refuse_repeated("hash", [key.digest for key in keys])
        return tuple(keys)

    def _key(self, path: Path, entry: dict[str, Any]) -> ApiKey:
        for name in entry:
            if name not in FIELDS:
                self._wrong((*path, name), self._name(path, entry), f"{name} is not known; known: {', '.join(FIELDS)}")
        read = _Entry(entry, lambda field, text: self._wrong((*path, field), self._name(path, entry), text))
        caller = Caller(read.tenant(), read.classes(), read.models(), read.truth("operator"))
        return ApiKey(read.id(), read.digest(), caller, read.expires_s(), read.truth("disabled"))

    def _name(self, path: Path, entry: dict[str, Any]) -> str:
        named = entry.get("id")
        return f"key {named!r:.80}" if isinstance(named, str) else f"key number {int(path[1]) + 1}"

    def _refuse_repeated(self, field: str, values: Sequence[str | bytes]) -> None:
        for index, value in enumerate(values):
            if value and value in values[:index]:
                first = values.index(value) + 1
                self._wrong(
                    ("key", str(index), field), f"key number {index + 1}", f"{field} is that of key number {first}"
                )

    def _wrong(self, path: Path, name: str, text: str) -> None:
        self.problems.append(Problem(line_of(self._lines, path), f"{name}: {text}"))


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry's fields as values; `wrong(field, text)` is told of what is not as it must be."""

    fields: dict[str, Any]
    wrong: Callable[[str, str], None]

    def id(self) -> str:
        value = self.fields.get("id")
        if isinstance(value, str) and value.isprintable() and 1 <= len(value) <= 100:
            return value
        self.wrong("id", "id must be text of 1 to 100 printable characters")
        return ""

    def digest(self) -> bytes:
        value = self.fields.get("hash")
        prefix, hexadecimal = HASH_PREFIX, value.removeprefix(HASH_PREFIX) if isinstance(value, str) else ""
        if isinstance(value, str) and value.startswith(prefix) and len(hexadecimal) == 64:
            try:
                return bytes.fromhex(hexadecimal)
            except ValueError:
                pass  # as any other hash that is none
        self.wrong("hash", f'hash must be "{prefix}" and 64 hexadecimal digits')
        return b""

    def tenant(self) -> str:
        value = self.fields.get("tenant")
        if isinstance(value, str) and is_tenant_name(value):
            return value
        self.wrong("tenant", f"tenant is needed; {TENANT_NAME}")
        return ""

    def classes(self) -> frozenset[types_pb2.PriorityClass] | None:
        names = self._names("classes")
        if names is not None and not names <= CLASSES.keys():
            self.wrong("classes", f"classes must be of {', '.join(CLASSES)}")
            return None
        return None if names is None else frozenset(CLASSES[name] for name in names)

    def models(self) -> frozenset[str] | None:
        return self._names("models")

    def expires_s(self) -> float | None:
        value = self.fields.get("expires")
        if value is None:
            return None
        if isinstance(value, datetime) and value.tzinfo is not None:
            return value.timestamp()
        self.wrong("expires", "expires must be a date and time with an offset, as 2027-01-01T00:00:00Z")
        return None

    def truth(self, field: str) -> bool:
        value = self.fields.get(field, False)
        if not isinstance(value, bool):
            self.wrong(field, f"{field} must be true or false")
        return value is True

    def _names(self, field: str) -> frozenset[str] | None:
        value = self.fields.get(field)
        if value is None:
            return None
        if isinstance(value, list) and value and all(isinstance(name, str) and name for name in value):
            return frozenset(value)
        self.wrong(field, f"{field} must be a list of names, not empty; leave it out to allow all")
        return None
