"""Authentication of routers: a certificate with an allowed name, or any caller with `insecure`, which requires a
loopback address.

An executor runs any request for any tenant that it is told of. Without this check, access to its port would mean access
to the whole pool.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc.aio

from inflight.common.errors import Reason, RequestError
from inflight.common.rpc.addresses import is_loopback
from inflight.common.rpc.tls import TlsFiles, TlsPaths
from inflight.common.settings import SettingError
from inflight.executor.settings import ExecutorSettings

TLS_SETTINGS = ("tls_cert_file", "tls_key_file", "tls_ca_file", "router_names")

# gRPC's names of the two SAN kinds of a verified certificate that are compared.
NAME_PROPERTIES = ("peer_dns", "peer_uri")


def load_server_tls(settings: ExecutorSettings) -> TlsFiles | None:
    """Returns the certificates to serve with, or None for `insecure`. Raises `SettingError` for settings that would let
    any remote caller in."""
    given = [name for name in TLS_SETTINGS if getattr(settings, name)]
    if settings.insecure:
        if given:
            raise SettingError(f"insecure contradicts {', '.join(given)}: leave out one or the other")
        if not is_loopback(settings.listen):
            raise SettingError(
                f"insecure is only for a loopback address, and listen is {settings.listen}: any host could use this "
                f"executor. Set {', '.join(TLS_SETTINGS)} (`inflight certs` makes certificates), or listen on 127.0.0.1"
            )
        return None
    missing = [name for name in TLS_SETTINGS if name not in given]
    if missing:
        raise SettingError(
            f"an executor serves only authenticated routers: set {', '.join(missing)} (`inflight certs` makes "
            "certificates), or, for use on this machine only, --insecure with a loopback address"
        )
    paths = TlsPaths.of(settings.tls_cert_file, settings.tls_key_file, settings.tls_ca_file, prefix="")
    assert paths is not None
    return TlsFiles.open(paths)


class PeerNameCheck:
    """Compares the names in a caller's certificate with the allowed router names."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def check(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Raises `RequestError` NOT_ALLOWED unless the caller's certificate has one of the names."""
        properties = context.auth_context()
        shown = {name.decode(errors="replace") for kind in NAME_PROPERTIES for name in properties.get(kind, ())}
        if self._names.isdisjoint(shown):
            raise RequestError(Reason.NOT_ALLOWED, "the certificate contains no name in this executor's router_names")
