"""The client that a command asks a router with: who calls and how the way there is protected, and the flags for that.

A key is best kept in the environment or a file: other users of the machine can see a program's flags. It is never
printed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from inflight.access import AccessOptions
from inflight.cli.address import add_address_flags, resolve_addresses, stack_in_use
from inflight.cli.outcome import EXIT_USAGE, CommandError, errors_in_words
from inflight.sync import Client

API_KEY_VARIABLE = "INFLIGHT_API_KEY"
TLS_VARIABLE = "INFLIGHT_TLS"
CA_FILE_VARIABLE = "INFLIGHT_CA_FILE"
SERVER_NAME_VARIABLE = "INFLIGHT_SERVER_NAME"

YES, NO = ("1", "true", "yes"), ("", "0", "false", "no")


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags about the router, the way there and the caller."""
    add_address_flags(parser)
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show what gRPC says about a connection that failed"
    )
    group = parser.add_argument_group("access")
    key = group.add_mutually_exclusive_group()
    key.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"API key or JSON web token [{API_KEY_VARIABLE}]; others can see it here: prefer the variable or a file",
    )
    key.add_argument("--api-key-file", metavar="FILE", help="file with the API key or JSON web token")
    group.add_argument(
        "--tls", action="store_true", help=f"reach the router by TLS, trusting public authorities [{TLS_VARIABLE}=1]"
    )
    group.add_argument(
        "--ca-file",
        metavar="FILE",
        help=f"PEM certificates of who may sign the router's; implies --tls [{CA_FILE_VARIABLE}]; default: the local "
        "stack's, where it has TLS",
    )
    group.add_argument(
        "--server-name",
        metavar="NAME",
        help=f"name that the router's certificate must bear [{SERVER_NAME_VARIABLE}]; default: its host",
    )


@contextmanager
def connected(flags: argparse.Namespace) -> Iterator[Client]:
    """A client of the routers that flags and environment name; what its calls raise becomes a `CommandError`."""
    addresses = resolve_addresses(flags)
    with (
        errors_in_words(", ".join(addresses), is_verbose=flags.verbose),
        Client(*addresses, **access_of(flags)) as client,
    ):
        yield client


def access_of(flags: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> AccessOptions:
    """The client's keywords about access; a flag goes before its variable."""
    stack = stack_in_use(flags, environment)
    access = access_of_environment(environment)
    if stack is not None and stack.ca_file:
        access.setdefault("ca_file", stack.ca_file)
    if flags.api_key is not None:
        access["api_key"] = flags.api_key
    elif flags.api_key_file is not None:
        access["api_key"] = _read_key(Path(flags.api_key_file))
    if flags.tls:
        access["tls"] = True
    if flags.ca_file is not None:
        access["ca_file"] = flags.ca_file
    if flags.server_name is not None:
        access["server_name"] = flags.server_name
    return access


def access_of_environment(environment: Mapping[str, str] = os.environ) -> AccessOptions:
    """What the variables say about access."""
    access: AccessOptions = {}
    if key := environment.get(API_KEY_VARIABLE):
        access["api_key"] = key
    if ca_file := environment.get(CA_FILE_VARIABLE):
        access["ca_file"] = ca_file
    if server_name := environment.get(SERVER_NAME_VARIABLE):
        access["server_name"] = server_name
    wants_tls = environment.get(TLS_VARIABLE, "").lower()
    if wants_tls not in (*YES, *NO):
        raise CommandError(f"{TLS_VARIABLE}: {wants_tls!r} is not one of {', '.join((*YES, *NO[1:]))}", EXIT_USAGE)
    if wants_tls in YES:
        access["tls"] = True
    return access


def _read_key(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise CommandError(f"--api-key-file: {error.strerror}: {path}", EXIT_USAGE) from None
    except UnicodeDecodeError:
        raise CommandError(f"--api-key-file: not a key: {path}", EXIT_USAGE) from None
