"""`inflight kube-secrets`: random values for the secrets that the manifests under deploy/kubernetes refer to.

Prints them as JSON for `kubectl apply -f -` and stores nothing. With cert-manager, `--without-certificates` leaves the
certificates out. `--without-api-keys` keeps keys that were added to the Secret later.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import secrets
import tempfile
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path

from inflight.cli.console import EXIT_USAGE, CommandError
from inflight.cli.deploy import key
from inflight.cli.parser import CommandParser
from inflight.local.certificates import DEFAULT_DAYS, LOCAL_NAMES, CertificateFolder, make_certificates
from inflight.local.redis_server import ACL_RULES, USER

MAX_DAYS = 3650
DEFAULT_PREFIX = "inflight"
OPERATOR = "operator"
# A label of Kubernetes, with room for the longest suffix of a Secret's name.
PREFIX = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")
REPLICA = "replica"
SENTINEL = "sentinel"

# What Redis' replicas and Sentinels do on the servers of a pool; see Redis' documentation of ACLs.
REPLICA_RULES = "+psync +replconf +ping"
SENTINEL_RULES = (
    "allchannels +multi +slaveof +ping +exec +subscribe +config|rewrite +role +publish +info +client|setname "
    "+client|kill +script|kill"
)


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    flags = _parser().parse_args(argv)
    if not 1 <= flags.days <= MAX_DAYS:
        raise CommandError(f"--days must be between 1 and {MAX_DAYS}, not {flags.days}", EXIT_USAGE)
    if not PREFIX.fullmatch(flags.prefix):
        raise CommandError(f"--prefix must match {PREFIX.pattern}, not {flags.prefix!r}", EXIT_USAGE)
    made = random_secrets(flags.prefix)
    if not flags.without_api_keys:
        made |= api_key_secrets(flags.prefix)
    if not flags.without_certificates:
        made |= certificate_secrets(flags.namespace, flags.name, flags.days, flags.prefix)
    print(json.dumps(_manifest(made, flags.namespace), indent=2))
    return 0


def router_names(namespace: str, prefix: str = DEFAULT_PREFIX) -> tuple[str, ...]:
    """Returns the names by which clients in the cluster find the routers."""
    service = f"{prefix}-router.{namespace}"
    return (f"{service}.svc", service, f"{service}.svc.cluster.local")


def random_secrets(prefix: str = DEFAULT_PREFIX) -> dict[str, dict[str, bytes]]:
    """Redis' passwords and users, and the secret of resume tokens."""
    password, replica_password, sentinel_password = (secrets.token_urlsafe(32) for _ in range(3))
    users = (
        "user default off",
        f"user {USER} on #{_digest(password)} {ACL_RULES}",
        f"user {REPLICA} on #{_digest(replica_password)} {REPLICA_RULES}",
        f"user {SENTINEL} on #{_digest(sentinel_password)} {SENTINEL_RULES}",
    )
    sentinel_users = (
        "user default off",
        f"user {USER} on #{_digest(password)} resetchannels +ping +sentinel|masters",
        f"user {SENTINEL} on #{_digest(sentinel_password)} allchannels allkeys +@all",
    )
    return {
        f"{prefix}-redis": {"password": password.encode()},
        f"{prefix}-redis-server": {
            "users.acl": _lines(users),
            "sentinel-users.acl": _lines(sentinel_users),
            "replica-password": replica_password.encode(),
            "sentinel-password": sentinel_password.encode(),
        },
        f"{prefix}-resume": {"secret": secrets.token_urlsafe(48).encode()},
    }


def api_key_secrets(prefix: str = DEFAULT_PREFIX) -> dict[str, dict[str, bytes]]:
    """Returns the routers' file of API keys with an operator's key, and that key, which `inflight pod-costs` uses."""
    operator = key.new_key()
    entry = key.entry(
        operator, argparse.Namespace(id=OPERATOR, tenant=OPERATOR, operator=True, classes=None, models=None, days=None)
    )
    return {
        f"{prefix}-api-keys": {"keys.toml": entry.encode() + b"\n"},
        f"{prefix}-operator-key": {"key": operator.encode()},
    }


def certificate_secrets(
    namespace: str, names: Sequence[str], days: int, prefix: str = DEFAULT_PREFIX
) -> dict[str, dict[str, bytes]]:
    """Secrets in the format of cert-manager. Raises `CommandError` if a name is not valid in a certificate."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            made = make_certificates(Path(folder), (*LOCAL_NAMES, *router_names(namespace, prefix), *names), days)
        except ValueError as error:
            raise CommandError(f"--name: not valid in a certificate: {error}", EXIT_USAGE) from None
        authority = made.ca_file.read_bytes()
        return {
            f"{prefix}-router-tls": _pair(made, "router"),
            f"{prefix}-executor-tls": _pair(made, "executor"),
            # Clients need no certificate of their own, only the authority of the routers'.
            f"{prefix}-client-tls": {"ca.crt": authority},
        }


def _pair(made: CertificateFolder, role: str) -> dict[str, bytes]:
    return {
        "tls.crt": made.certificate(role).read_bytes(),
        "tls.key": made.key(role).read_bytes(),
        "ca.crt": made.ca_file.read_bytes(),
    }


def _manifest(made: Mapping[str, Mapping[str, bytes]], namespace: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {
                    "name": name,
                    "namespace": namespace,
                    "labels": {"app.kubernetes.io/name": "inflight", "app.kubernetes.io/part-of": "inflight"},
                },
                "type": "kubernetes.io/tls" if "tls.key" in content else "Opaque",
                "data": {key: b64encode(value).decode() for key, value in content.items()},
            }
            for name, content in made.items()
        ],
    }


def _digest(password: str) -> str:
    return hashlib.sha256(password.encode()).hexdigest()


def _lines(lines: Sequence[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode()


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="inflight kube-secrets",
        description="Creates the secrets that deploy/kubernetes and the Helm chart refer to: Redis passwords, the "
        "secret of resume tokens, an operator's API key, and certificates of a small authority. Prints Secrets for "
        "`kubectl apply -f -`. Every run creates new ones; the authority's key is not stored.",
    )
    parser.add_argument(
        "--namespace", default="inflight", metavar="NAME", help="namespace of the secrets (default: inflight)"
    )
    parser.add_argument(
        "--prefix",
        default=DEFAULT_PREFIX,
        metavar="NAME",
        help="first part of the secrets' names: the full name of a Helm release (default: inflight)",
    )
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="NAME",
        help="additional host, address or URI in the certificates, such as a load balancer; may be repeated",
    )
    parser.add_argument(
        "--days",
        type=int,
        default=DEFAULT_DAYS,
        metavar="N",
        help=f"validity of the certificates in days (default: {DEFAULT_DAYS})",
    )
    parser.add_argument("--without-certificates", action="store_true", help="leave certificates out, for cert-manager")
    parser.add_argument("--without-api-keys", action="store_true", help="leave API keys out, to keep those in use")
    return parser
