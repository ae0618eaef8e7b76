"""`inflight explain`: where a request stands and what it waits for."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from inflight.catalogue import RequestStanding, RequestState
from inflight.cli.flags import add_connection_flags, add_request_flags, connected, resume_token_of
from inflight.cli.parser import CommandParser


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    flags = _parser().parse_args(argv)
    with connected(flags) as client:
        standing = client.get_request(
            flags.request_id,
            resume_token=resume_token_of(flags, os.environ),
            model=flags.model or "",
            tenant=flags.tenant or "",
        )
    if flags.json:
        print(json.dumps({**asdict(standing), "state": standing.state.value}))
    else:
        print("\n".join(standing_lines(standing)))
    return 0


def standing_lines(standing: RequestStanding) -> Iterator[str]:
    """Lines for a person: the state first, then the reason."""
    served_by = f" by {standing.variant}" if standing.variant else ""
    yield f"{standing.request_id}: {_state(standing)}{served_by}"
    if standing.state is RequestState.WAITING and standing.waiting_for:
        yield f"  {standing.waiting_for}"
    if standing.state is RequestState.WAITING and not standing.executor_id:
        wait_s = standing.estimated_wait_s
        yield f"  requests ahead of it: {standing.position}, class {standing.priority}"
        yield "  estimated wait: " + ("unknown" if wait_s is None else f"about {wait_s:.3g} s")
    if standing.output_tokens:
        yield f"  {standing.output_tokens} tokens so far"
    if standing.state is RequestState.PLACED and standing.step_constraint not in ("unspecified", "no_work"):
        yield f"  latest step of its executor was bound by: {standing.step_constraint.replace('_', ' ')}"


def _state(standing: RequestStanding) -> str:
    return f"on {standing.executor_id}" if standing.state is RequestState.PLACED else standing.state.value


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="inflight explain", description="Shows the state of a request and, while it waits, what it waits for."
    )
    add_request_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_connection_flags(parser)
    return parser
