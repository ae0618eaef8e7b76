"""gRPC channels from a router to executors: without TLS, or with mutual TLS. They never use a proxy.

A channel is opened with the certificates that are current then. It keeps them while it is open.
"""

from __future__ import annotations

import grpc.aio

from inflight.common.rpc.options import NO_PROXY, channel_options
from inflight.common.rpc.server import MAX_LINK_BYTES
from inflight.common.rpc.tls import TlsFiles, TlsPaths
from inflight.common.settings import SettingError
from inflight.router.settings import RouterSettings


class ExecutorChannels:
    """Opens channels to executors. `tls` None: no TLS. `name` is the name that the executors' certificates must have;
    empty: the host of the executor's address."""

    def __init__(self, tls: TlsFiles | None = None, name: str = "") -> None:
        self.tls = tls
        self._name = name

    @classmethod
    def of(cls, settings: RouterSettings) -> ExecutorChannels:
        """Returns the channels for the settings. Raises `SettingError` if the settings contradict each other."""
        ca_file, cert_file, key_file = (
            settings.executor_tls_ca_file,
            settings.executor_tls_cert_file,
            settings.executor_tls_key_file,
        )
        paths = TlsPaths.of(cert_file, key_file, ca_file, prefix="executor_")
        if paths is None and ca_file is None:
            if settings.executor_tls_name:
                raise SettingError(
                    "executor_tls_name needs executor_tls_ca_file: without TLS executors present no certificate"
                )
            return cls()
        if paths is None:
            raise SettingError(
                "executor_tls_ca_file needs executor_tls_cert_file and executor_tls_key_file: executors accept only "
                "routers with a certificate"
            )
        if ca_file is None:
            raise SettingError("executor_tls_cert_file needs executor_tls_ca_file, the authority of trusted executors")
        return cls(TlsFiles.open(paths), settings.executor_tls_name)

    def open(self, address: str, options: list[tuple[str, int]]) -> grpc.aio.Channel:
        """Returns a new channel with these options added to those of every link."""
        options = [*channel_options(MAX_LINK_BYTES), NO_PROXY, *options]
        if self.tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        names = [("grpc.ssl_target_name_override", self._name)] if self._name else []
        return grpc.aio.secure_channel(address, self.tls.channel_credentials(), options=[*options, *names])
