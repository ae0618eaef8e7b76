"""API keys: the file of keys, and the owner of a presented key.

Pure: takes TOML text and returns frozen values, or raises a `ContentError` with the line and key of every problem.

    [[key]]
    id = "acme-1"                         # for people and logs; no secret
    hash = "sha256:9f86…"                 # of the key; the key itself is stored nowhere
    tenant = "acme"
    classes = ["standard", "batch"]       # without the line: all
    models = ["SmolLM2-135M-Instruct"]    # without the line: all
    operator = false                      # may act for, and inspect, every tenant
    expires = 2027-01-01T00:00:00Z        # without the line: never
    disabled = false

Hashes that are slow on purpose (bcrypt, argon2) protect passwords, which people choose and which can be guessed. A key
of 256 random bits cannot be guessed at any speed, so SHA-256 is enough and adds no cost to a request. A hash does not
show that its key was weak: only keys that are too short are refused, when they are presented.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, AwareDatetime, Field
from pydantic_core import PydanticCustomError

from inflight.router.auth.caller import Caller
from inflight.router.config.tenants import TenantName
from inflight.router.config.toml_file import BELOW, Table, read_toml
from inflight.v1 import types_pb2

MIN_KEY_CHARACTERS = 32
MAX_KEYS = 10_000
MAX_ID_CHARACTERS = 100
HASH_PREFIX = "sha256:"
HASH = re.compile(HASH_PREFIX + "[0-9A-Fa-f]{64}")

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
        """Returns whether the key is valid now."""
        return not self.is_disabled and (self.expires_s is None or now_s < self.expires_s)


def find_key(keys: Sequence[ApiKey], presented: str) -> ApiKey | None:
    """Returns the entry of a key. Compares every entry in constant time, whichever matches."""
    if len(presented) < MIN_KEY_CHARACTERS:
        return None
    digest = hashlib.sha256(presented.encode()).digest()
    found: ApiKey | None = None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    return found


def parse_keys(source: str) -> tuple[ApiKey, ...]:
    """Parses the file. No error repeats a value, which may be a key by mistake. Raises `ContentError`."""
    return tuple(entry.to_key() for entry in read_toml(source, _File, shows_values=False).key)


def _key_id(value: str) -> str:
    if not (value.isprintable() and 1 <= len(value) <= MAX_ID_CHARACTERS):
        raise ValueError(f"must be text of 1 to {MAX_ID_CHARACTERS} printable characters")
    return value


def _hash(value: str) -> str:
    if not HASH.fullmatch(value):
        raise ValueError(f'must be "{HASH_PREFIX}" and 64 hexadecimal digits')
    return value.lower()


ClassName = Literal["interactive", "standard", "batch"]


class _Entry(Table):
    """`[[key]]`."""

    id: Annotated[str, AfterValidator(_key_id)]
    hash: Annotated[str, AfterValidator(_hash)]
    tenant: TenantName
    classes: Annotated[list[ClassName], Field(min_length=1)] | None = None
    models: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    operator: bool = False
    expires: AwareDatetime | None = None
    disabled: bool = False

    def to_key(self) -> ApiKey:
        classes = None if self.classes is None else frozenset(CLASSES[name] for name in self.classes)
        models = None if self.models is None else frozenset(self.models)
        expires_s = None if self.expires is None else self.expires.timestamp()
        digest = bytes.fromhex(self.hash.removeprefix(HASH_PREFIX))
        return ApiKey(self.id, digest, Caller(self.tenant, classes, models, self.operator), expires_s, self.disabled)


def _distinct(entries: list[_Entry]) -> list[_Entry]:
    for name in ("id", "hash"):
        first: dict[str, int] = {}
        for number, entry in enumerate(entries):
            known = first.setdefault(getattr(entry, name), number)
            if known != number:
                raise PydanticCustomError("repeated", f"is that of key number {known + 1}", {BELOW: (number, name)})
    return entries


class _File(Table):
    """The whole file."""

    key: Annotated[list[_Entry], Field(default_factory=list, max_length=MAX_KEYS), AfterValidator(_distinct)]
