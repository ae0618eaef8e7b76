"""The flags of commands about one request that somebody else may have sent."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

RESUME_TOKEN_VARIABLE = "INFLIGHT_RESUME_TOKEN"


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the request's id and what proves whose it is."""
    parser.add_argument("request_id", metavar="REQUEST_ID", help="the request's id")
    parser.add_argument("--model", metavar="NAME", help="the model it asked for; default: the only one")
    parser.add_argument(
        "--resume-token",
        metavar="TOKEN",
        help=f"token that came with it, see `inflight generate --show-token` [{RESUME_TOKEN_VARIABLE}]; needed where "
        "the router identifies its callers, unless the caller is an operator",
    )
    parser.add_argument("--tenant", metavar="NAME", help="whose request it is; default: the caller's own")


def resume_token_of(flags: argparse.Namespace, environment: Mapping[str, str]) -> str:
    """The token: flag, environment, none."""
    return str(flags.resume_token or environment.get(RESUME_TOKEN_VARIABLE, ""))
