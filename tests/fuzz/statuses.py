"""The statuses that each RPC may end with, as docs/statuses.md promises them, and whether an error keeps to it."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from inflight.common.errors import DETAILS_KEY

PAGE = Path(__file__).parents[2] / "docs" / "statuses.md"
NO_REASON = "–"
COMMON = "Every RPC"

Statuses = dict[str, set[tuple[str, str]]]


# The executors of these tests have a fake device, and no model whose vocabulary a grammar could be compiled for.
COMPILES_NONE = "the executor refused the request: constraint: this executor compiles none"


def documented() -> Statuses:
    """By section, the pairs of status and reason."""
    statuses: Statuses = defaultdict(set)
    section = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
            statuses[section] = set()
        elif row := re.match(r"\| ([A-Z_]+) \| ([A-Z_]+|–) \|", line):
            statuses[section].add((row[1], row[2]))
    return statuses


def status_of(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    """The status of an error with the reason in its details."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            assert isinstance(value, bytes)
            for detail in status_pb2.Status.FromString(value).details:
                reason = error_details_pb2.ErrorInfo()
                if detail.Unpack(reason):
                    return error.code().name, reason.reason
    return error.code().name, NO_REASON


def check_documented(rpc: str, error: grpc.aio.AioRpcError, statuses: Statuses) -> None:
    """Checks that the RPC may end with this error and that it is no bug."""
    status = status_of(error)
    assert status in statuses[COMMON] | statuses[rpc], f"{rpc}: {status} {error.details()}"
    if error.details() == COMPILES_NONE:
        return
    assert status[0] not in ("INTERNAL", "UNKNOWN"), f"{rpc}: {status} {error.details()}"
