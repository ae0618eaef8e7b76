"""How a command ends: its exit codes, and the one error that `main` prints as a line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from inflight.errors import InflightError

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class CommandError(Exception):
    """The command cannot do what it was asked to. The text is for the user."""

    def __init__(self, text: str, exit_code: int = EXIT_FAILURE) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@contextmanager
def errors_in_words(address: str, *, is_verbose: bool = False) -> Iterator[None]:
    """Turns what a call to the router at `address` can raise into a `CommandError`."""
    try:
        yield
    except InflightError as error:
        raise CommandError(in_words(error, address, is_verbose=is_verbose)) from None
    except ValueError as error:
        raise CommandError(str(error), EXIT_USAGE) from None


def in_words(error: InflightError, address: str, *, is_verbose: bool = False) -> str:
    """One line about a failed call; gRPC's own words about a connection come with `is_verbose` alone."""
    if error.code is grpc.StatusCode.UNAVAILABLE and not error.reason:
        hint = error.hint or "`inflight up` starts one"
        raw = f" ({_first_line(error.description)})" if is_verbose else ""
        return f"no router answers at {address}; {hint}{raw}"
    return _first_line(str(error))


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no reason given"
