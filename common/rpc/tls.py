"""Certificates on disk: read at start and after every change, and passed to gRPC and HTTP servers without a restart.

It owns a certificate chain, its key and, if the peer must show a certificate too, the CA of that one. Files are checked
before they are used: a pair that does not match or has expired is ignored, and the previous one stays in use. Open
connections keep the certificates that they were opened with.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from inflight.common.followed import FileVersion, poll, version_of
from inflight.common.settings import SettingError

log = logging.getLogger(__name__)

# The versions of all files.
Version = tuple[FileVersion | None, ...]


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """PEM text: a certificate chain, its private key, and the CA of the peer's certificate."""

    certificates: bytes
    key: bytes
    ca: bytes | None


@dataclass(frozen=True, slots=True)
class TlsPaths:
    """Paths of the material. `prefix` is the beginning of the settings' names."""

    cert_file: Path
    key_file: Path
    ca_file: Path | None = None
    prefix: str = ""

    @classmethod
    def of(cls, cert_file: Path | None, key_file: Path | None, ca_file: Path | None, *, prefix: str) -> Self | None:
        """Returns None if neither file of the pair is set. Raises `SettingError` if only one is."""
        if cert_file is None and key_file is None:
            return None
        if cert_file is None or key_file is None:
            there, missing = ("key", "cert") if cert_file is None else ("cert", "key")
            raise SettingError(f"{prefix}tls_{there}_file needs {prefix}tls_{missing}_file: TLS takes both or neither")
        return cls(cert_file, key_file, ca_file, prefix)


class TlsFiles:
    """The material in use."""

    def __init__(self, paths: TlsPaths, version: Version, material: TlsMaterial) -> None:
        self._paths = paths
        self._version = version
        self._material = material
        # What `ssl_context` switches new connections to; None until it is called.
        self._context: ssl.SSLContext | None = None

    @classmethod
    def open(cls, paths: TlsPaths) -> Self:
        """Reads the files. Raises `SettingError` if they cannot be used."""
        version = _version(paths)
        try:
            return cls(paths, version, _read(paths))
        except _Unusable as error:
            raise SettingError(str(error)) from None

    @property
    def material(self) -> TlsMaterial:
        """The current material; a new object after every change."""
        return self._material

    async def follow(self) -> None:
        """Polls the files until cancelled."""
        await poll(self.look)

    def look(self) -> None:
        """Reads the files if one has changed since the last check."""
        version = _version(self._paths)
        if version == self._version:
            return
        self._version = version  # so that unusable files are logged once
        try:
            material = _read(self._paths)
            if self._context is not None and material != self._material:
                self._context = _new_context(self._paths)
        except _Unusable as error:
            log.warning("certificates changed and cannot be used; the previous ones stay in use: %s", error)
            return
        if material != self._material:
            self._material = material
            log.info("the certificates in %s changed; new connections use them", self._paths.cert_file)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Returns credentials that show the current certificates to every new connection and, with a CA, require a
        client certificate."""
        shown = self._material

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Returns a new configuration after a change. gRPC calls it at every handshake, in its own thread."""
            nonlocal shown
            if self._material is shown:
                return None
            shown = self._material
            return _configuration(shown)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(shown),
            changed,  # type: ignore[arg-type]  # None says that nothing has changed
            require_client_authentication=shown.ca is not None,
        )

    def ssl_context(self) -> ssl.SSLContext:
        """Returns a context for servers that use Python's `ssl`. It shows the current certificates to every new
        connection, and requires no client certificate. Raises `SettingError`."""
        try:
            context = self._context = _new_context(self._paths)
        except _Unusable as error:
            raise SettingError(str(error)) from None

        def choose(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, of_server: ssl.SSLContext) -> None:
            """Switches a handshake to the current context. OpenSSL calls it whether or not the client sends a name."""
            assert self._context is not None
            connection.context = self._context

        context.sni_callback = choose
        return context

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns credentials for one new channel, with the current material."""
        now = self._material
        return grpc.ssl_channel_credentials(now.ca, now.key, now.certificates)


class _Unusable(Exception):
    """The files cannot be used. The text contains the setting, the file and the reason."""


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.certificates)], material.ca)


def _new_context(paths: TlsPaths) -> ssl.SSLContext:
    """Loads the pair again, because Python's `ssl` reads keys only from files. It also applies OpenSSL's own rules,
    such as the minimum size of a key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(paths.cert_file, paths.key_file)
    except OSError as error:  # `ssl.SSLError` is one
        names = f"{paths.prefix}tls_cert_file and {paths.prefix}tls_key_file"
        raise _Unusable(f"{names}: {paths.cert_file} and {paths.key_file} cannot be used: {error}") from None
    return context


def _version(paths: TlsPaths) -> Version:
    return tuple(version_of(path) for path in (paths.cert_file, paths.key_file, paths.ca_file) if path is not None)


def _read(paths: TlsPaths) -> TlsMaterial:
    cert_name, key_name = f"{paths.prefix}tls_cert_file", f"{paths.prefix}tls_key_file"
    certificates = _read_file(cert_name, paths.cert_file)
    key = _read_file(key_name, paths.key_file)
    leaf = _parse_certificates(cert_name, paths.cert_file, certificates)[0]
    if _public_key(key_name, paths.key_file, key) != leaf.public_key():
        raise _Unusable(f"{key_name}: {paths.key_file} is not the key of the certificate in {paths.cert_file}")
    if leaf.not_valid_after_utc < datetime.now(UTC):
        raise _Unusable(f"{cert_name}: {paths.cert_file} expired on {leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
    if paths.ca_file is None:
        return TlsMaterial(certificates, key, None)
    ca_name = f"{paths.prefix}tls_ca_file"
    ca = _read_file(ca_name, paths.ca_file)
    _parse_certificates(ca_name, paths.ca_file, ca)
    return TlsMaterial(certificates, key, ca)


def _read_file(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _Unusable(f"{name}: cannot read {str(path)!r}: {error.strerror}") from None


def _parse_certificates(name: str, path: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise _Unusable(f"{name}: {path} has no PEM certificate: {error}") from None


def _public_key(name: str, path: Path, pem: bytes) -> PublicKeyTypes:
    try:
        return load_pem_private_key(pem, password=None).public_key()
    except (ValueError, TypeError) as error:  # TypeError: it has a password
        raise _Unusable(f"{name}: {path} has no PEM private key without a password: {error}") from None
