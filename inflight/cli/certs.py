"""`inflight certs`: certificates for development and for trying TLS."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from inflight.cli.outcome import EXIT_FAILURE, EXIT_USAGE, CommandError
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
        raise CommandError(f"{error}: nothing is overwritten; name another folder", EXIT_USAGE) from None
    except ValueError as error:
        raise CommandError(f"--name: cannot stand in a certificate: {error}", EXIT_USAGE) from None
    except OSError as error:
        raise CommandError(f"cannot write to {flags.folder}: {error.strerror}", EXIT_FAILURE) from None
    print(_settings(made, flags.days))
    return 0


def _settings(made: CertificateFolder, days: int) -> str:
    """What to do with them."""
    return "\n".join(
        (
            f"Made an authority and certificates for {days} days in {made.folder}.",
            "Whoever reads ca.key can make more: for real use, take your own authority's.",
            "",
            _command("inflight router", made.router_settings()),
            "",
            _command("inflight executor", made.executor_settings()),
            "",
            f"Clients trust {made.ca_file}.",
        )
    )


def _command(program: str, settings: Mapping[str, str]) -> str:
    return " \\\n".join((program, *(f"  {flag} {value}" for flag, value in settings.items())))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="inflight certs",
        description="Makes a small authority and certificates (ECDSA P-256) for routers and executors, for development "
        "and for trying TLS, and prints the settings that use them. Overwrites nothing.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to write to; made where it is not there")
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="NAME",
        help="another name that the certificates bear: a host, an address or a URI such as spiffe://…; may be repeated "
        f"(always there: {', '.join(LOCAL_NAMES)})",
    )
    parser.add_argument(
        "--days", type=int, default=DEFAULT_DAYS, metavar="N", help=f"days until they expire (default: {DEFAULT_DAYS})"
    )
    return parser
