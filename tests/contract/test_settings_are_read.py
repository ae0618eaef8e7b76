"""A check that every setting of a process is read somewhere: an unused setting promises what it does not do."""

from __future__ import annotations

import ast

import pytest

from inflight.common.settings import ProcessSettings
from inflight.executor.settings import ExecutorSettings
from inflight.gateway.settings import GatewaySettings
from inflight.router.settings import RouterSettings
from tests.contract.test_imports import parsed, sources


def attributes_read_in(*packages: str) -> set[str]:
    """Returns names of attributes that code reads, outside the checks of the settings classes themselves."""
    return {
        node.attr
        for path in sources(*packages)
        if path.name != "settings.py"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


@pytest.mark.parametrize(
    ("package", "settings"), [("router", RouterSettings), ("executor", ExecutorSettings), ("gateway", GatewaySettings)]
)
def test_every_setting_is_read(package: str, settings: type[ProcessSettings]) -> None:
    assert not set(settings.model_fields) - attributes_read_in(package, "common")
