"""Which calls need a known caller, and the check of that before a request is received."""

from __future__ import annotations

from common.rpc.status import CheckCaller
from router.auth.caller import Authenticator, Metadata

# Health and reflection are open; so is what says no more than health does.
CLOSED_SERVICES = ("/inflight.v1.InferenceService/", "/inference.GRPCInferenceService/")
OPEN_METHODS = frozenset(
    {"/inference.GRPCInferenceService/ServerLive", "/inference.GRPCInferenceService/ServerReady"},
)


def caller_check(authenticator: Authenticator) -> CheckCaller:
    """Refuses calls of unknown callers."""

    def check(method: str, metadata: Metadata) -> None:
        if method.startswith(CLOSED_SERVICES) and method not in OPEN_METHODS:
            authenticator.identify(metadata)

    return check
