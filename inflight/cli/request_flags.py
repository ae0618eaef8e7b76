"""The flags of commands about one request, possibly of another program."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

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
    """The token: the flag, else the environment, else empty."""
    return str(flags.resume_token or environment.get(RESUME_TOKEN_VARIABLE, ""))
