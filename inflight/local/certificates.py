"""Development certificates: a small authority, and a certificate each for routers and executors.

For one machine or a test bed. The authority's key is stored next to the certificates, so anyone who can read the folder
can create more. In production, use your own authority (cert-manager, SPIRE, …).
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

ROUTER_NAME = "inflight-router"
EXECUTOR_NAME = "inflight-executor"
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
DEFAULT_DAYS = 90

# Clocks of machines differ.
BACKDATED = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class CertificateFolder:
    """The paths of the certificates and keys in a folder."""

    folder: Path

    @property
    def ca_file(self) -> Path:
        """The certificate of the authority, which clients, routers and executors trust."""
        return self.certificate("ca")

    def certificate(self, role: str) -> Path:
        """Returns the certificate of `ca`, `router` or `executor`."""
        return self.folder / f"{role}.pem"

    def key(self, role: str) -> Path:
        """Its private key, which only its owner may read."""
        return self.folder / f"{role}.key"

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns the credentials of a router for mutual TLS."""
        key, certificate = self.key("router").read_bytes(), self.certificate("router").read_bytes()
        return grpc.ssl_channel_credentials(self.ca_file.read_bytes(), key, certificate)

    @property
    def files(self) -> tuple[Path, ...]:
        """All files."""
        roles = ("ca", "router", "executor")
        return tuple(path for role in roles for path in (self.certificate(role), self.key(role)))

    def executor_settings(self) -> dict[str, str]:
        """Settings of `inflight executor` by flag."""
        return {
            "--tls-cert-file": str(self.certificate("executor")),
            "--tls-key-file": str(self.key("executor")),
            "--tls-ca-file": str(self.ca_file),
            "--router-names": ROUTER_NAME,
        }

    def gateway_settings(self) -> dict[str, str]:
        """Settings of `inflight gateway` by flag."""
        return {"--router-tls-ca-file": str(self.ca_file), "--router-tls-name": ROUTER_NAME}

    def router_settings(self) -> dict[str, str]:
        """Settings of `inflight router` by flag."""
        return {
            "--tls-cert-file": str(self.certificate("router")),
            "--tls-key-file": str(self.key("router")),
            "--executor-tls-ca-file": str(self.ca_file),
            "--executor-tls-cert-file": str(self.certificate("router")),
            "--executor-tls-key-file": str(self.key("router")),
            "--executor-tls-name": EXECUTOR_NAME,
        }


def make_certificates(folder: Path, names: Iterable[str] = LOCAL_NAMES, days: int = DEFAULT_DAYS) -> CertificateFolder:
    """Creates an authority and certificates of routers and executors with additional `names`: hosts, addresses, URIs.

    Raises:
        FileExistsError: one of the files exists.
        ValueError: a name is not valid in a certificate.
        OSError: the folder cannot be written to.
    """
    made = CertificateFolder(folder)
    for path in made.files:
        if path.exists():
            raise FileExistsError(f"{path} already exists")
    general_names = [_general_name(name) for name in dict.fromkeys(names)]
    folder.mkdir(parents=True, exist_ok=True)
    authority = _Authority.make(timedelta(days=days))
    _write(made, "ca", authority.certificate, authority.key)
    for role, name in (("router", ROUTER_NAME), ("executor", EXECUTOR_NAME)):
        key = ec.generate_private_key(ec.SECP256R1())
        _write(made, role, authority.sign(name, key, [x509.DNSName(name), *general_names]), key)
    return made


@dataclass(frozen=True, slots=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    validity: timedelta

    @classmethod
    def make(cls, validity: timedelta) -> _Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _subject("inflight development authority")
        builder = (
            _builder(subject, subject, key, validity)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
        )
        return cls(builder.sign(key, hashes.SHA256()), key, validity)

    def sign(self, name: str, key: ec.EllipticCurvePrivateKey, names: Sequence[x509.GeneralName]) -> x509.Certificate:
        """Issues a certificate for both ends of a connection: a router is a server to clients and a client of
        executors."""
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = (
            _builder(_subject(name), self.certificate.subject, key, self.validity)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(authority_key, critical=False)
        )
        return builder.sign(self.key, hashes.SHA256())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, validity: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + validity)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    """Returns a URI (`spiffe://…`), an address, or else a host's name."""
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write(made: CertificateFolder, role: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    # Created unreadable for others, and never overwriting a file.
    descriptor = os.open(made.key(role), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(pem)
    with made.certificate(role).open("xb") as file:
        file.write(certificate.public_bytes(serialization.Encoding.PEM))
