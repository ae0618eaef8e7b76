"""`python -m bench.chaos`."""

from __future__ import annotations

import sys

from bench.chaos.main import main
from inflight.cli.console import CommandError

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
