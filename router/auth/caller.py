"""The caller of an RPC, and what it may ask for.

An `Authenticator` identifies the caller by the metadata of a call; `authorize` checks a request against the caller. A
tenant that a request names is trusted only if callers are not authenticated.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from inflight.common.errors import Reason, RequestError
from inflight.router.ledger.types import DEFAULT_TENANT
from inflight.v1 import inference_pb2, types_pb2

Metadata = Sequence[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class Caller:
    """An identified caller. `tenant` None: not identified; the tenant that it names is trusted. `classes` and `models`
    are what it may ask for; None: all. An operator may inspect and cancel any tenant's requests without their token."""

    tenant: str | None = None
    classes: frozenset[types_pb2.PriorityClass] | None = None
    models: frozenset[str] | None = None
    is_operator: bool = False


ANYBODY = Caller(is_operator=True)
"""The caller if the router does not authenticate callers."""


class Authenticator(Protocol):
    """Identifies callers."""

    def identify(self, metadata: Metadata) -> Caller:
        """Returns the caller of a call with this metadata. Raises `RequestError` UNAUTHENTICATED."""
        ...


_verified: ContextVar[Caller | None] = ContextVar("verified_caller", default=None)


def remember_verified(caller: Caller) -> None:
    """Stores the caller of the call that the current task serves, so that its credential is verified once."""
    _verified.set(caller)


def verified_caller() -> Caller | None:
    """Returns the caller of the call that the current task serves; None if it has not been verified."""
    return _verified.get()


class AnonymousAuthenticator:
    """Identifies no caller: the tenants that requests name are trusted."""

    def identify(self, metadata: Metadata) -> Caller:
        return ANYBODY


def authorize(request: inference_pb2.GenerateRequest, caller: Caller) -> None:
    """Sets the tenant and class that the caller may use. Raises `RequestError` NOT_ALLOWED."""
    request.model = model_of(caller, request.model)
    if caller.tenant is not None:
        request.tenant = effective_tenant(caller, request.tenant)
    request.priority = _class_of(caller, request.priority)


def effective_tenant(caller: Caller, named: str) -> str:
    """Returns the tenant of a request. Raises `RequestError` NOT_ALLOWED if it names a tenant other than the
    caller's."""
    if caller.tenant is None:
        return named or DEFAULT_TENANT
    if named and named != caller.tenant and not caller.is_operator:
        raise RequestError(Reason.NOT_ALLOWED, f"tenant: must be empty or {caller.tenant!r}, the caller's own")
    return named or caller.tenant


def model_of(caller: Caller, named: str) -> str:
    """Returns the model that a request names; without a name, the caller's only model. Raises `RequestError`
    NOT_ALLOWED."""
    if caller.models is None or named in caller.models:
        return named
    if not named and len(caller.models) == 1:
        return min(caller.models)
    known = ", ".join(sorted(caller.models))
    raise RequestError(Reason.NOT_ALLOWED, f"model: {named[:100]!r} is not among the caller's: {known}")


def sees_model(caller: Caller, model: str) -> bool:
    """Returns whether the caller may know of the model."""
    return caller.models is None or model in caller.models


def _class_of(caller: Caller, asked: types_pb2.PriorityClass) -> types_pb2.PriorityClass:
    """Returns the class asked for. Without one: the best class of the caller from standard down, else the one above."""
    if caller.classes is None:
        return asked
    if asked == types_pb2.PRIORITY_CLASS_UNSPECIFIED:
        later = [one for one in caller.classes if one >= types_pb2.PRIORITY_CLASS_STANDARD]
        return min(later, default=max(caller.classes))
    if asked not in caller.classes:
        names = ", ".join(types_pb2.PriorityClass.Name(one) for one in sorted(caller.classes))
        raise RequestError(Reason.NOT_ALLOWED, f"priority: must be one of {names}, the caller's")
    return asked
