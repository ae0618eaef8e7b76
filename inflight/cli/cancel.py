"""`inflight cancel`: cancels a request by its id."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from inflight.catalogue import RequestState
from inflight.cli.flags import add_connection_flags, add_request_flags, connected, resume_token_of
from inflight.cli.parser import CommandParser


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
    print(f"{flags.request_id}: " + ("already ended" if has_ended else f"cancelled; it was {state.value}"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="inflight cancel",
        description="Cancels a request, whether it waits or runs. Its own stream reports the end.",
    )
    add_request_flags(parser)
    add_connection_flags(parser)
    return parser
