"""Options of gRPC connections: keepalive and message sizes, which concern both ends, metadata, and no proxy.

Imports nothing, because the client library needs it without the packages of a server.
"""

from __future__ import annotations

# Keepalive. Each end sends a ping after this long without data from the other, also without a call. A ping that is not
# answered in time ends the connection. A client can use another router, but a server that drops a client cancels its
# requests, so servers wait longer (`inflight.common.rpc.server`).
KEEPALIVE_TIME_MS = 10_000
CHANNEL_KEEPALIVE_TIMEOUT_MS = 5_000

# The default for both ends: a prompt and its output as token ids.
MAX_RECEIVE_BYTES = 32 * 1024 * 1024

# All headers of a call together, with room for JSON web tokens with many claims. gRPC has two limits and refuses some
# of the calls between them, so both are the same.
MAX_METADATA_BYTES = 16 * 1024

# Metadata of each stream of a `GenerateMany`; all other metadata is that of the call.
TRACE_KEYS = frozenset({"traceparent", "tracestate"})

# gRPC would use the proxies that http_proxy and https_proxy name, without an exception for this machine.
NO_PROXY = ("grpc.enable_http_proxy", 0)


def channel_options(max_message_bytes: int = MAX_RECEIVE_BYTES) -> list[tuple[str, int]]:
    """Returns the options of every channel that this project opens."""
    return [*options_of_both_ends(max_message_bytes), *keepalive_timeout(CHANNEL_KEEPALIVE_TIMEOUT_MS)]


def keepalive_timeout(timeout_ms: int) -> list[tuple[str, int]]:
    """Returns both options. Measured with gRPC 1.85: without the second a silent peer is detected after a minute."""
    return [("grpc.keepalive_timeout_ms", timeout_ms), ("grpc.http2.ping_timeout_ms", timeout_ms)]


def options_of_both_ends(max_receive_bytes: int) -> list[tuple[str, int]]:
    """Returns the options that servers and channels share."""
    return [
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        # Otherwise only two pings are sent until there is a call again, and then one a minute.
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", -1),  # the receiver has the limit
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ]
