"""The connection of a tensor-parallel worker to its leader."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from inflight.executor.parallel import member


def test_connection_to_itself_is_closed_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may choose the leader's port, on which nobody listens yet, for the worker's end of the connection."""
    opened: list[socket.socket] = []
    create_connection = socket.create_connection
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()

    def create(address: tuple[str, int], **options: Any) -> socket.socket:
        if not opened:
            to_itself = socket.socket()
            to_itself.bind(("127.0.0.1", 0))
            to_itself.connect(to_itself.getsockname())
            opened.append(to_itself)
        else:
            opened.append(create_connection(address, **options))
        return opened[-1]

    monkeypatch.setattr(socket, "create_connection", create)
    monkeypatch.setattr(member, "CONNECT_INTERVAL_S", 0.0)
    host, port = listening.getsockname()
    with listening, member._connect(f"{host}:{port}") as connection:
        assert connection is opened[1]
        assert connection.getpeername() == (host, port)
        assert opened[0].fileno() == -1, "closed"
