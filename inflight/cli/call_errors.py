"""Errors of calls to routers, as text for the user of a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from inflight.cli.console import EXIT_FAILURE, EXIT_USAGE, CommandError
from inflight.errors import InflightError, names_no_host, unresolved_target


@contextmanager
def errors_in_words(address: str, *, is_verbose: bool = False) -> Iterator[None]:
    """Turns the errors of a call to the router at `address` into `CommandError`."""
    try:
        yield
    except InflightError as error:
        exit_code = EXIT_USAGE if names_no_host(error) else EXIT_FAILURE
        raise CommandError(in_words(error, address, is_verbose=is_verbose), exit_code) from None
    except ValueError as error:
        raise CommandError(str(error), EXIT_USAGE) from None


def in_words(error: InflightError, address: str, *, is_verbose: bool = False) -> str:
    """One line about a failed call. `is_verbose` adds gRPC's own message about a broken connection."""
    if error.code is grpc.StatusCode.UNAVAILABLE and not error.reason:
        raw = f" ({_first_line(error.description)})" if is_verbose else ""
        if target := unresolved_target(error):
            text = f"the host name of the router {target!r} cannot be resolved; check --address (INFLIGHT_ADDRESS)"
            return text + raw
        return f"no router answers at {address}; {error.hint or '`inflight up` starts one'}{raw}"
    return _first_line(str(error))


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no reason given"
