"""Redis URLs: what they mean, and that no error repeats what may hold a password."""

from __future__ import annotations

import pytest

from inflight.router.ledger.redis_url import RedisKind, parse_redis_url
from inflight.router.settings import RouterSettings

SECRET = "secret-word"


def test_url_of_a_server() -> None:
    address = parse_redis_url("rediss://user:p%40ss@host:7000/2?ssl_ca_certs=/ca.pem")
    assert (address.kind, address.has_tls) == (RedisKind.SERVER, True)
    named = {name: address.options[name] for name in ("username", "password", "host", "port", "db", "ssl_ca_certs")}
    expected = {
        "username": "user",
        "password": "p@ss",
        "host": "host",
        "port": 7000,
        "db": 2,
        "ssl_ca_certs": "/ca.pem",
    }
    assert named == expected


def test_url_of_sentinels() -> None:
    url = "rediss+sentinel://user:pass@one,[::1]:26380,three/the-master/3?sentinel_password=word&ssl_ca_certs=/ca.pem"
    address = parse_redis_url(url)
    assert (address.kind, address.has_tls, address.master) == (RedisKind.SENTINEL, True, "the-master")
    assert address.nodes == (("one", 26379), ("::1", 26380), ("three", 26379))
    assert {"username": "user", "password": "pass", "db": 3}.items() <= address.options.items()
    assert address.sentinel_options == {"username": None, "password": "word", "ssl_ca_certs": "/ca.pem"}
    assert "sentinel_password" not in address.options


def test_url_of_a_cluster() -> None:
    address = parse_redis_url("redis+cluster://:pass@one:7000,two")
    assert (address.kind, address.has_tls) == (RedisKind.CLUSTER, False)
    assert address.nodes == (("one", 7000), ("two", 6379))
    assert address.options["password"] == "pass"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        (f"http://:{SECRET}@host", "must begin with redis://"),
        (f"redis+sentinel://:{SECRET}@host:1", "followed by /master-name"),
        (f"redis+sentinel://:{SECRET}@host:1/a/1/2", "followed by /master-name"),
        (f"redis+sentinel://:{SECRET}@host:1/a/b", "whole number"),
        (f"redis+sentinel://:{SECRET}@host:port/a", "a port must be"),
        (f"redis+cluster://:{SECRET}@host:1/1", "0 or left out in a cluster"),
        (f"redis+cluster://:{SECRET}@host:1,,other", "host:port,host:port"),
        (f"redis+cluster://:{SECRET}@", "host:port,host:port"),
        (f"redis://:{SECRET}@host:port", "is not a Redis URL"),
        (f"redis://:{SECRET}@host?socket_timeout={SECRET}", "is not a Redis URL"),
    ],
)
def test_error_says_what_is_allowed_and_repeats_nothing(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        parse_redis_url(url)
    assert SECRET not in str(caught.value)
    with pytest.raises(ValueError, match="redis_url") as refused:
        RouterSettings(redis_url=url)  # type: ignore[arg-type]
    assert SECRET not in str(refused.value.errors()[0]["msg"])  # type: ignore[attr-defined]
