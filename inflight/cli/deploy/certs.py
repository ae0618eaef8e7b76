"""`inflight certs`: certificates for development and tests."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from inflight.cli.console import EXIT_FAILURE, EXIT_USAGE, CommandError
from inflight.cli.parser import CommandParser
from inflight.local.certificates import DEFAULT_DAYS, LOCAL_NAMES, CertificateFolder, make_certificates

MAX_DAYS = 3650


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    flags = _parser().parse_args(argv)
    if not 1 <= flags.days <= MAX_DAYS:
        raise CommandError(f"--days must be between 1 and {MAX_DAYS}, not {flags.days}", EXIT_USAGE)
    try:
        made = make_certificates(flags.folder, (*LOCAL_NAMES, *flags.name), flags.days)
    except FileExistsError as error:
        reason = f"{flags.folder} is a file" if os.path.isfile(flags.folder) else str(error)
        raise CommandError(f"{reason}; choose another directory", EXIT_USAGE) from None
    except ValueError as error:
        raise CommandError(f"--name: not valid in a certificate: {error}", EXIT_USAGE) from None
    except OSError as error:
        raise CommandError(f"cannot write to {flags.folder}: {error.strerror}", EXIT_FAILURE) from None
    print(_settings(made, flags.days))
    return 0


def _settings(made: CertificateFolder, days: int) -> str:
    """Returns the settings that use the certificates."""
    return "\n".join(
        (
            f"Created an authority and certificates for {days} days in {made.folder}.",
            "Anyone who can read ca.key can create more: in production, use your own authority.",
            "",
            _command("inflight router", made.router_settings()),
            "",
            _command("inflight executor", made.executor_settings()),
            "",
            f"Clients use --ca-file {made.ca_file}.",
        )
    )


def _command(program: str, settings: Mapping[str, str]) -> str:
    return " \\\n".join((program, *(f"  {flag} {value}" for flag, value in settings.items())))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="inflight certs",
        description="Creates a small authority and certificates (ECDSA P-256) for routers and executors, for "
        "development and tests, and prints the settings that use them. Overwrites no file.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="directory to write to; created if missing")
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="NAME",
        help="additional name in the certificates: a host, an address or a URI such as spiffe://…; may be repeated "
        f"(always included: {', '.join(LOCAL_NAMES)})",
    )
    parser.add_argument(
        "--days", type=int, default=DEFAULT_DAYS, metavar="N", help=f"validity in days (default: {DEFAULT_DAYS})"
    )
    return parser
