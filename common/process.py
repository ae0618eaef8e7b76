"""A server process: its id, its exit codes, and operator errors as one line instead of a traceback."""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Callable

from inflight.common.machine import raise_open_files_limit
from inflight.common.model_source import ModelError
from inflight.common.rpc.server import ListenError
from inflight.common.settings import SettingError

EXIT_FAILED = 1
EXIT_BAD_SETTING = 2
EXIT_CANNOT_LISTEN = 3


def run_process(body: Callable[[], int]) -> int:
    """Runs a process with as many file descriptors as it may have. Returns its exit code: 2 for a setting or model that
    cannot be used, 3 for an address."""
    raise_open_files_limit()
    try:
        return body()
    except (SettingError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_SETTING
    except ListenError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CANNOT_LISTEN


def new_process_id(listen: str) -> str:
    """Returns host, port and a random number. It is new at every start, so that nothing for the previous process
    reaches this one, and differs between cloned machines, which have equal names."""
    return f"{socket.gethostname()}:{listen.rpartition(':')[2]}:{secrets.token_hex(4)}"
