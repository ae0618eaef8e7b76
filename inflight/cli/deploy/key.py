"""`inflight key new`: a new API key, and its entry for `--api-keys-file`.

The key is printed once and stored nowhere; the entry holds only its hash. Needs no router. If a local stack runs, the
command warns of models that the stack does not serve.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from inflight.cli.flags import access_of_environment, add_run_dir_flag, resolve_run_dir
from inflight.cli.parser import CommandParser, nearest
from inflight.errors import InflightError
from inflight.local.state import read_state
from inflight.requests import PRIORITIES
from inflight.sync import Client

KEY_BYTES = 32
MAX_DAYS = 36_500
LOOK_S = 2.0
QUOTE = "'"
PREFIX = "inflight-"  # so that scanners for leaked secrets can know it


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    flags = _parser().parse_args(argv)
    key = new_key()
    print("# The key. It is shown only once and gives full access as this tenant:", file=sys.stderr)
    print(key)
    _warn_of_unserved_models(flags)
    print("\n# The entry for the router's --api-keys-file:", file=sys.stderr)
    print(entry(key, flags))
    return 0


def new_key() -> str:
    """Returns a random API key."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="inflight key", description="Creates API keys.")
    new = parser.add_subparsers(required=True, metavar="ACTION").add_parser("new", help="create a key")
    new.add_argument("--tenant", required=True, type=_tenant, help="tenant of the key")
    new.add_argument(
        "--id", help="name of the key in the file and in logs, not secret; default: the tenant and a random suffix"
    )
    new.add_argument(
        "--classes", type=_classes, help=f"priority classes it may use, of {','.join(PRIORITIES)}; default: all"
    )
    new.add_argument("--models", type=_names, help="models it may use, comma-separated; default: all")
    new.add_argument("--operator", action="store_true", help="allow it to act for every tenant")
    add_run_dir_flag(new)
    new.add_argument("--days", type=_days, help="days until it expires; default: never")
    return parser


def _warn_of_unserved_models(flags: argparse.Namespace) -> None:
    """Asks the local stack, if one runs. The router's log warns in any case when it reads the file."""
    stack = read_state(resolve_run_dir(flags)) if flags.models else None
    if stack is None:
        return
    access = access_of_environment()
    if stack.ca_file:
        access.setdefault("ca_file", stack.ca_file)
    try:
        with Client(stack.address, retries=False, **access) as client:
            served = [model.name for model in client.list_models(timeout=LOOK_S)]
    except (InflightError, ValueError):
        return
    for name in flags.models:
        if name not in served:
            print(f"warning: the local stack serves no model {name!r}{nearest(name, served, QUOTE)}", file=sys.stderr)


def entry(key: str, flags: argparse.Namespace) -> str:
    """Returns the TOML of a key. `flags` are those of `inflight key new`."""
    lines = [
        "[[key]]",
        f"id = {_quoted(flags.id or f'{flags.tenant}-{secrets.token_hex(3)}')}",
        f'hash = "sha256:{hashlib.sha256(key.encode()).hexdigest()}"',
        f"tenant = {_quoted(flags.tenant)}",
    ]
    lines += [f"{name} = {_quoted(names)}" for name in ("classes", "models") if (names := getattr(flags, name))]
    if flags.operator:
        lines.append("operator = true")
    if flags.days is not None:
        expires = datetime.now(UTC) + timedelta(days=flags.days)
        lines.append(f"expires = {expires:%Y-%m-%dT%H:%M:%SZ}")
    return "\n".join(lines)


def _tenant(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def _classes(text: str) -> list[str]:
    names = _names(text)
    for name in names:
        if name not in PRIORITIES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(PRIORITIES)}")
    return names


def _days(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_DAYS:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {MAX_DAYS}")
    return int(text)


def _names(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def _quoted(value: str | list[str]) -> str:
    """Text and lists of text are written in TOML as in JSON."""
    return json.dumps(value, ensure_ascii=False)
