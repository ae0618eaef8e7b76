"""Redis URLs: one server, a master behind Sentinels, or the nodes of a cluster. Pure.

    redis://[user:password@]host:port/db                         rediss://…           the same over TLS
    unix://[user:password@]/path?db=0
    redis+sentinel://[user:password@]host:port,host:port/master/db    rediss+sentinel://…
    redis+cluster://[user:password@]host:port,host:port          rediss+cluster://…

Parameters after `?` are options of the connections, by redis-py's names: `ssl_ca_certs`, `ssl_certfile`,
`ssl_keyfile`, …; and `sentinel_username` and `sentinel_password` for the Sentinels themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from redis.asyncio.connection import parse_url

SCHEMES = (
    "redis://",
    "rediss://",
    "unix://",
    "redis+sentinel://",
    "rediss+sentinel://",
    "redis+cluster://",
    "rediss+cluster://",
)


class RedisKind(Enum):
    """The kind of server, by the second half of the scheme, and its default port."""

    SERVER = ("", 6379)
    SENTINEL = ("sentinel", 26379)
    CLUSTER = ("cluster", 6379)


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A parsed URL.

    `options` are connection options by redis-py's names. For a single server they include its address. `nodes` are the
    Sentinels or the nodes of the cluster. `master` is the name of the master in the Sentinels' configuration.
    `sentinel_options` are the options of connections to Sentinels.
    """

    kind: RedisKind
    options: Mapping[str, Any]
    has_tls: bool = False
    nodes: tuple[tuple[str, int], ...] = ()
    master: str = ""
    sentinel_options: Mapping[str, Any] | None = None


def parse_redis_url(url: str) -> RedisAddress:
    """Parses the URL. Raises `ValueError`. Its text repeats no part of the URL, which may contain a password."""
    if not url.startswith(SCHEMES):
        raise ValueError(f"must begin with {' or '.join(SCHEMES)}")
    scheme, _, suffix = urlsplit(url).scheme.partition("+")
    kind = next(kind for kind in RedisKind if kind.value[0] == suffix)
    if kind is RedisKind.SERVER:
        return RedisAddress(kind, _options(url), scheme == "rediss")
    return _of_several(kind, scheme, url)


def _of_several(kind: RedisKind, scheme: str, url: str) -> RedisAddress:
    parts = urlsplit(url)
    user, at, hosts = parts.netloc.rpartition("@")
    path = [unquote(part) for part in parts.path.strip("/").split("/") if part]
    master = _master(path) if kind is RedisKind.SENTINEL else ""
    db = path[-1] if len(path) > (kind is RedisKind.SENTINEL) else "0"
    if not db.isdecimal() or (kind is RedisKind.CLUSTER and db != "0"):
        raise ValueError("the number of the database must be a whole number, and 0 or left out in a cluster")
    options = _options(urlunsplit((scheme, f"{user}{at}", f"/{db}", parts.query, "")))
    sentinel = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
    nodes = tuple(_node(host, kind.value[1]) for host in hosts.split(","))
    return RedisAddress(kind, options, scheme == "rediss", nodes, master, sentinel | tls)


def _options(url: str) -> dict[str, Any]:
    try:
        return dict(parse_url(url))
    except ValueError:
        raise ValueError("is not a Redis URL, or an option after the ? has an invalid value") from None


def _master(path: list[str]) -> str:
    if not 1 <= len(path) <= 2:
        raise ValueError("the Sentinels' hosts are followed by /master-name or /master-name/db")
    return path[0]


def _node(text: str, default_port: int) -> tuple[str, int]:
    """Parses `host`, `host:port` or `[v6]:port`."""
    parts = urlsplit(f"//{text}")
    try:
        port = parts.port or default_port
    except ValueError:
        raise ValueError("a port must be a number from 1 to 65535") from None
    if not parts.hostname:
        raise ValueError("hosts are written host:port,host:port")
    return parts.hostname, port
