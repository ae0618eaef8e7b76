"""The blocking client is what its generator makes of the asynchronous one, and offers the same."""

from __future__ import annotations

import inspect

import pytest

from inflight import aio, aio_connection, aio_stream, sync, sync_connection, sync_stream
from tools.sync_client import CLIENT, GENERATED, blocking


@pytest.mark.parametrize(("source", "target"), GENERATED.items())
def test_the_blocking_client_is_fresh(source: str, target: str) -> None:
    assert (CLIENT / target).read_text(encoding="utf-8") == blocking(source), "run `make sync-client`"


@pytest.mark.parametrize(
    ("asynchronous", "blocking_one"),
    [
        (aio.AsyncClient, sync.Client),
        (aio_stream.AsyncStream, sync_stream.Stream),
        (aio_connection.AsyncConnection, sync_connection.Connection),
        (aio_connection.AsyncStreamCalls, sync_connection.StreamCalls),
        (aio_connection.AsyncCancelFlag, sync_connection.CancelFlag),
    ],
)
def test_both_have_the_same_methods_and_parameters(asynchronous: type, blocking_one: type) -> None:
    assert parameters(asynchronous) == parameters(blocking_one)


def parameters(of: type) -> dict[str, list[str]]:
    """The parameters of each public method."""
    members = inspect.getmembers(of, inspect.isfunction)
    return {name: list(inspect.signature(method).parameters) for name, method in members if not name.startswith("_")}
