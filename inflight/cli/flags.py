"""Flags that several commands share, and what they stand for: routers, credentials, requests and sampling.

Keep a key in the environment or a file: other users of the machine can see a program's flags. It is never printed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from inflight.access import AccessOptions
from inflight.cli.call_errors import errors_in_words
from inflight.cli.console import EXIT_USAGE, CommandError
from inflight.common.parameters import PARAMETERS, Kind
from inflight.local.state import DEFAULT_RUN_DIR, StackState, read_state
from inflight.requests import PRIORITIES, GenerateOptions
from inflight.sync import Client

ADDRESS_VARIABLE = "INFLIGHT_ADDRESS"
RUN_DIR_VARIABLE = "INFLIGHT_RUN_DIR"
DEFAULT_ADDRESS = "localhost:50051"


def add_address_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--address` and `--run-dir`."""
    parser.add_argument(
        "--address",
        metavar="HOST:PORT[,…]",
        help=f"address of a router, or several that share the calls [{ADDRESS_VARIABLE}]; default: the routers of the "
        f"local stack in the run directory, else {DEFAULT_ADDRESS}",
    )
    add_run_dir_flag(parser)


def add_run_dir_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help=f"directory of the local stack's state.json and logs [{RUN_DIR_VARIABLE}]; default: {DEFAULT_RUN_DIR}",
    )


def resolve_addresses(options: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Returns the routers to use: the flag, else the environment, else the running local stack, else the default."""
    given = options.address or environment.get(ADDRESS_VARIABLE)
    if given:
        return tuple(str(given).split(","))
    state = stack_in_use(options, environment)
    if state is None:
        return (DEFAULT_ADDRESS,)
    others = (process.address for process in state.processes if process.role == "router")
    return tuple(dict.fromkeys((state.address, *others)))


def stack_in_use(options: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> StackState | None:
    """Returns the local stack, if its routers are to be used."""
    if options.address or environment.get(ADDRESS_VARIABLE):
        return None
    return read_state(resolve_run_dir(options, environment))


def resolve_run_dir(options: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the run directory: the flag, else the environment, else the default."""
    return Path(options.run_dir or environment.get(RUN_DIR_VARIABLE) or DEFAULT_RUN_DIR)


API_KEY_VARIABLE = "INFLIGHT_API_KEY"
TLS_VARIABLE = "INFLIGHT_TLS"
CA_FILE_VARIABLE = "INFLIGHT_CA_FILE"
SERVER_NAME_VARIABLE = "INFLIGHT_SERVER_NAME"

YES, NO = ("1", "true", "yes"), ("", "0", "false", "no")


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for the address, credentials and TLS."""
    add_address_flags(parser)
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="include gRPC's own message when a connection fails"
    )
    group = parser.add_argument_group("access")
    key = group.add_mutually_exclusive_group()
    key.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"API key or JSON web token [{API_KEY_VARIABLE}]; other users can see it in the process list: prefer the "
        "variable or --api-key-file",
    )
    key.add_argument("--api-key-file", metavar="FILE", help="file with the API key or JSON web token")
    group.add_argument("--tls", action="store_true", help=f"use TLS and trust public authorities [{TLS_VARIABLE}=1]")
    group.add_argument(
        "--ca-file",
        metavar="FILE",
        help=f"PEM file with the authorities to trust; implies --tls [{CA_FILE_VARIABLE}]; default: that of the local "
        "stack if it uses TLS",
    )
    group.add_argument(
        "--server-name",
        metavar="NAME",
        help=f"name expected in the router's certificate [{SERVER_NAME_VARIABLE}]; default: the host of its address",
    )


@contextmanager
def connected(flags: argparse.Namespace) -> Iterator[Client]:
    """Opens a client of the routers that flags and environment name. Errors of its calls become `CommandError`."""
    addresses = resolve_addresses(flags)
    with (
        errors_in_words(", ".join(addresses), is_verbose=flags.verbose),
        Client(*addresses, **access_of(flags)) as client,
    ):
        yield client


def access_of(flags: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> AccessOptions:
    """Returns the client's keywords for credentials and TLS. A flag overrides its variable."""
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
    """Returns the client's keywords that the variables set."""
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
        raise CommandError(f"--api-key-file: contains no key: {path}", EXIT_USAGE) from None


RESUME_TOKEN_VARIABLE = "INFLIGHT_RESUME_TOKEN"


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the request's id and the flags that authorize the caller."""
    parser.add_argument("request_id", metavar="REQUEST_ID", help="id of the request")
    parser.add_argument("--model", metavar="NAME", help="model of the request; default: the only one")
    parser.add_argument(
        "--resume-token",
        metavar="TOKEN",
        help=f"token of the request, from `inflight generate --show-token` [{RESUME_TOKEN_VARIABLE}]; required if the "
        "router authenticates callers, except for operators",
    )
    parser.add_argument("--tenant", metavar="NAME", help="tenant of the request; default: the caller's")


def resume_token_of(flags: argparse.Namespace, environment: Mapping[str, str]) -> str:
    """The token: Returns the flag, else the environment, else empty."""
    return str(flags.resume_token or environment.get(RESUME_TOKEN_VARIABLE, ""))


# Keyword of `Client.generate` → its flag.
_REQUEST_FLAGS = {name: one.flag for name, one in PARAMETERS.items() if one.flag is not None}


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=BIAS") from None


def _token_ids(text: str) -> list[int]:
    try:
        return [int(token_id) for token_id in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids") from None


# How argparse reads the value of a flag, by the kind of the value, and where that does not say it.
_READ_KIND: Mapping[Kind, Mapping[str, Any]] = {
    Kind.FLOAT: {"type": float},
    Kind.DURATION: {"type": float},
    Kind.INT32: {"type": int},
    Kind.UINT32: {"type": int},
    Kind.UINT64: {"type": int},
    Kind.TEXTS: {"action": "append"},
    Kind.IDS: {"type": _token_ids},
}
_READ: Mapping[str, Mapping[str, Any]] = {
    "logit_bias": {"type": _bias, "action": "append"},
    "priority": {"choices": PRIORITIES, "metavar": None},
}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags for model, sampling, stopping and admission. The default of each is the model's."""
    group = parser.add_argument_group("request", "The defaults are the model's.")
    for keyword, flag in _REQUEST_FLAGS.items():
        how = _READ.get(keyword) or _READ_KIND.get(PARAMETERS[keyword].kind, {})
        group.add_argument(flag.name, dest=keyword, help=flag.help, **{"metavar": flag.metavar, **how})
    _add_constraint_flags(parser)


def _add_constraint_flags(parser: argparse.ArgumentParser) -> None:
    form = parser.add_argument_group("form of the output", "At most one; the output always has this form.")
    kinds = form.add_mutually_exclusive_group()
    kinds.add_argument("--json-schema", metavar="FILE|JSON", help="JSON that satisfies this schema")
    kinds.add_argument("--json-object", action="store_true", help="any JSON object")
    kinds.add_argument("--regex", metavar="REGEX", help="text that matches this regular expression as a whole")
    kinds.add_argument("--choice", action="append", metavar="TEXT", help="one of these texts; repeated for each")
    kinds.add_argument("--grammar", metavar="FILE", help="text of a grammar in llguidance's dialect of Lark")


def _constraint_options(flags: argparse.Namespace) -> GenerateOptions:
    """Returns the keywords for the form of the output."""
    options: GenerateOptions = {}
    if flags.json_schema is not None:
        is_text = flags.json_schema.lstrip().startswith("{")
        options["json_schema"] = flags.json_schema if is_text else _read_text("--json-schema", flags.json_schema)
    if flags.json_object:
        options["json_object"] = True
    if flags.regex is not None:
        options["regex"] = flags.regex
    if flags.choice:
        options["choice"] = flags.choice
    if flags.grammar is not None:
        options["grammar"] = _read_text("--grammar", flags.grammar)
    return options


def _read_text(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{flag}: {error.strerror}: {path}", EXIT_USAGE) from None
    except UnicodeDecodeError:
        raise CommandError(f"{flag}: is not UTF-8: {path}", EXIT_USAGE) from None


def request_options(flags: argparse.Namespace) -> GenerateOptions:
    """Returns the keywords of `Client.generate` that the flags set."""
    given = {keyword: getattr(flags, keyword) for keyword in _REQUEST_FLAGS}
    options = {keyword: value for keyword, value in given.items() if value is not None}
    if "logit_bias" in options:
        options["logit_bias"] = dict(options["logit_bias"])
    return cast("GenerateOptions", {**options, **_constraint_options(flags)})


def add_choice_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags for several choices."""
    group = parser.add_argument_group("choices")
    group.add_argument("--n", type=int, metavar="N", help="number of outputs; output k has the seed + k; default: 1")
    group.add_argument(
        "--best-of", type=int, metavar="N", help="number of outputs to generate, of which the likeliest are shown"
    )


def choice_options(flags: argparse.Namespace) -> GenerateOptions:
    """Returns the keywords of `Client.generate` that these flags set."""
    options: GenerateOptions = {}
    if flags.n is not None:
        options["n"] = flags.n
    if flags.best_of is not None:
        options["best_of"] = flags.best_of
    return options
