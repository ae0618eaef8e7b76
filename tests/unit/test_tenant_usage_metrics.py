"""Metrics of the usage of tenants: only those that the settings name are named."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from inflight.router.app import tenant_costs_of
from inflight.router.ledger.types import FIGURES, Account, AccountUsage
from inflight.router.settings import RouterSettings
from inflight.router.telemetry.metrics import RouterMetrics

BUSY, COST = "inflight_usage_tenant_busy_seconds_total", "inflight_usage_tenant_cost_total"
CHARGED = (
    Account(1, "acme", 2, "", "h200", False),
    Account(1, "acme", 3, "", "cpu", False),
    Account(1, "secret", 2, "", "h200", False),
    Account(1, "secretive", 2, "", "h200", False),
    Account(1, "", 0, "", "h200", True),
)


def charged(settings: RouterSettings) -> CollectorRegistry:
    """The metrics after an hour of busy time of each account."""
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry, ["tiny"], tenant_costs_of(settings))
    for account in CHARGED:
        metrics.charged("tiny", AccountUsage(account, (3600 * 10**9, *(0,) * (len(FIGURES) - 1))))
    return registry


def values(registry: CollectorRegistry, name: str) -> dict[str, float]:
    samples = (sample for metric in registry.collect() for sample in metric.samples if sample.name == name)
    return {sample.labels["tenant"]: sample.value for sample in samples}


def test_named_tenants_have_busy_time_and_costs_and_the_others_are_one() -> None:
    settings = RouterSettings(usage_metrics_tenants=("acme",), executor_prices=("h200=3.5",), price_currency="EUR")
    registry = charged(settings)
    assert values(registry, BUSY) == {"acme": 7200, "(others)": 7200, "(system)": 3600}
    assert values(registry, COST) == {"acme": 3.5, "(others)": 7.0, "(system)": 3.5}
    assert registry.get_sample_value(COST, {"model": "tiny", "tenant": "acme", "currency": "EUR"}) == 3.5


def test_no_tenant_is_named_by_default() -> None:
    registry = charged(RouterSettings())
    assert values(registry, BUSY) == values(registry, COST) == {}
