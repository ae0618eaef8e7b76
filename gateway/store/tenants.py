"""Tenants of what is stored. Routers say whose a credential is."""

from __future__ import annotations

from collections.abc import Mapping

from inflight import AsyncClient
from inflight.errors import InflightError
from inflight.gateway.errors import ApiError, from_router


async def tenant_of(client: AsyncClient, metadata: Mapping[str, str], param: str) -> str:
    """Returns the tenant of a caller, by the metadata of its calls of routers. Raises `ApiError`; `param` is what an
    error names."""
    try:
        tenant = await client.tenant(metadata=metadata)
    except InflightError as error:
        raise from_router(error, param) from None
    if not tenant:
        text = "the router is of a version that does not say whose a key is, which what is stored needs"
        raise ApiError(503, text, "server_error", code="unavailable")
    return tenant
