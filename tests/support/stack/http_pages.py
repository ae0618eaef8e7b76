"""A page of an HTTP port, as a scraper gets it."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Mapping
from typing import Any


async def page(address: str, path: str = "/metrics", headers: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Its content type and its text. Raises urllib's `HTTPError` for what is not found."""
    return await asyncio.to_thread(_page, f"http://{address}{path}", dict(headers or {}))


def _page(url: str, headers: dict[str, str]) -> tuple[str, str]:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as response:
        return response.headers["Content-Type"], response.read().decode()


async def post_json(address: str, path: str, body: Mapping[str, Any]) -> Any:
    """The JSON that answers JSON. Raises urllib's `HTTPError` for what is refused."""
    request = urllib.request.Request(
        f"http://{address}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return json.loads(await asyncio.to_thread(_read, request))


def _read(request: urllib.request.Request) -> bytes:
    with urllib.request.urlopen(request, timeout=60) as response:
        content: bytes = response.read()
    return content
