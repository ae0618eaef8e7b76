"""Figures that a process of a fleet publishes on `/metrics`."""

from __future__ import annotations

import asyncio
import urllib.request

from prometheus_client.parser import text_string_to_metric_families


async def metric_sum(address: str, name: str, timeout_s: float) -> float:
    """Returns the sum of all samples with this name. Raises `OSError` if the process does not answer."""
    return await asyncio.to_thread(_sum, address, name, timeout_s)


def _sum(address: str, name: str, timeout_s: float) -> float:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}/metrics", timeout=timeout_s) as response:
        text = response.read().decode()
    families = text_string_to_metric_families(text)
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)
