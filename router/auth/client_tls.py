"""TLS of the port that clients connect to, and the limits of one connection."""

from __future__ import annotations

import logging

from inflight.common.rpc.addresses import is_loopback
from inflight.common.rpc.server import ConnectionLimits
from inflight.common.rpc.tls import TlsFiles, TlsPaths
from inflight.router.settings import RouterSettings

log = logging.getLogger(__name__)

# Bytes of a request besides its prompt.
REQUEST_FIELDS_BYTES = 1024 * 1024


def open_tls(settings: RouterSettings) -> TlsFiles | None:
    """Returns the certificates to serve clients with; None for serving in the clear. Raises `SettingError`."""
    paths = TlsPaths.of(settings.tls_cert_file, settings.tls_key_file, None, prefix="")
    if paths is not None:
        return TlsFiles.open(paths)
    if not is_loopback(settings.listen):
        log.warning(
            "prompts and outputs are sent without TLS: set tls_cert_file and tls_key_file, or listen on a "
            "loopback address (listen is %s)",
            settings.listen,
        )
    return None


def connection_limits_of(settings: RouterSettings) -> ConnectionLimits:
    """Returns the limits of a client's connection."""
    return ConnectionLimits(
        max_streams=settings.max_streams_per_connection,
        max_idle_s=settings.max_connection_idle_s,
        max_age_s=settings.max_connection_age_s,
        handshake_timeout_s=settings.handshake_timeout_s,
        # A prompt of as many ids takes 3 bytes for each; one that is too large by no more gets validation's own answer.
        max_receive_bytes=4 * settings.max_prompt_bytes + REQUEST_FIELDS_BYTES,
    )
