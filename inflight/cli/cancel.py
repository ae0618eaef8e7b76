"""`inflight cancel`: ends a request by its id."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from inflight.catalogue import RequestState
from inflight.cli.connection import add_connection_flags, connected
from inflight.cli.parser import CommandParser
from inflight.cli.request_flags import add_request_flags, resume_token_of


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    flags = _parser().parse_args(argv)
    with connected(flags) as client:
        state = client.cancel(
            flags.request_id,
            resume_token=resume_token_of(flags, os.environ),
            model=flags.model or "",
            tenant=flags.tenant or "",
        )
    has_ended = state is RequestState.ENDED
    print(f"{flags.request_id}: " + ("had ended before" if has_ended else f"ends; it was {state.value}"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="inflight cancel", description="Ends a request, wherever it is. Its own stream says when it has ended."
    )
    add_request_flags(parser)
    add_connection_flags(parser)
    return parser
