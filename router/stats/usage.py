"""What tenants have used, for `GetUsage`: the ledger's totals by day, with costs.

An operator sees every tenant and the system's part. Any other caller sees the lines of its own tenant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from inflight.common.errors import FieldViolation, invalid
from inflight.common.time_of_day import day_text, parse_day, unix_day
from inflight.router.auth.caller import Caller, effective_tenant
from inflight.router.dispatch.pools import ModelPools
from inflight.router.ledger.types import FIGURES, Account, AccountUsage
from inflight.router.settings import RouterSettings
from inflight.v1 import inference_pb2, types_pb2

# Of a call: the days that the ledger keeps, and the current one.
MAX_DAYS = 92
NS_PER_HOUR = 3_600_000_000_000


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of an hour of busy time, by class of executors."""

    currency: str = "USD"
    per_hour: Mapping[str, float] = field(default_factory=dict)

    def cost(self, account: Account, busy_ns: int) -> float | None:
        """Returns the cost of busy time; None without a price."""
        price = self.per_hour.get(account.executor_class)
        return None if price is None else price * busy_ns / NS_PER_HOUR


def prices_of(settings: RouterSettings) -> Prices:
    entries = (entry.partition("=") for entry in settings.executor_prices)
    return Prices(settings.price_currency, {name: float(price) for name, _, price in entries})


async def usage_seen_by(
    caller: Caller, request: inference_pb2.GetUsageRequest, pools: ModelPools, prices: Prices
) -> inference_pb2.GetUsageResponse:
    """Returns the lines that a caller may see. Raises `RequestError`."""
    tenant = request.tenant
    if not caller.is_operator:
        tenant = effective_tenant(caller, request.tenant)
    found: list[tuple[str, AccountUsage]] = []
    since_ms = 0
    for day in _days(request):
        for pool in pools.seen_by(caller, request.model):
            usage = await pool.dispatcher.usage(day)
            found += [(pool.name, one) for one in usage.accounts]
            since_ms = max(since_ms, usage.since_ms or 0)
    if tenant:
        found = [(model, one) for model, one in found if one.account.tenant == tenant and not one.account.is_system]
    found.sort(key=_order)
    lines = [usage_line(model, one, prices) for model, one in found]
    return inference_pb2.GetUsageResponse(
        lines=lines, currency=prices.currency, complete_since_unix_ms=since_ms or None
    )


def is_measured(used: types_pb2.ResourceUsage) -> bool:
    """Returns whether executors told the busy time; those with vLLM do not."""
    return bool(used.busy_ns) or not used.output_tokens


def usage_line(model: str, usage: AccountUsage, prices: Prices) -> inference_pb2.UsageLine:
    """Returns the message of an account's total."""
    account = usage.account
    used = types_pb2.ResourceUsage(**dict(zip(FIGURES, usage.figures, strict=True)))
    return inference_pb2.UsageLine(
        day=day_text(account.day),
        model=model,
        tenant=account.tenant,
        priority=types_pb2.PriorityClass.Name(account.priority_class),
        adapter=account.adapter,
        executor_class=account.executor_class,
        is_system=account.is_system,
        used=used,
        cost=prices.cost(account, used.busy_ns) if is_measured(used) else None,
    )


def _order(line: tuple[str, AccountUsage]) -> tuple[int, str, bool, str, int, str, str]:
    model, account = line[0], line[1].account
    parts = (account.priority_class, account.adapter, account.executor_class)
    return account.day, model, account.is_system, account.tenant, *parts


def _days(request: inference_pb2.GetUsageRequest) -> Iterator[int]:
    """Returns the days of a request. Raises `RequestError`."""
    today = unix_day()
    since = _day("since", request.since, today)
    until = _day("until", request.until, max(today, since))
    if until < since:
        raise invalid(FieldViolation("until", "must not be before since"))
    if until - since >= MAX_DAYS:
        raise invalid(FieldViolation("since", f"must be at most {MAX_DAYS - 1} days before until"))
    return iter(range(since, until + 1))


def _day(name: str, text: str, default: int) -> int:
    if not text:
        return default
    try:
        return parse_day(text)
    except ValueError:
        raise invalid(FieldViolation(name, "must be a day, such as 2026-11-30")) from None
