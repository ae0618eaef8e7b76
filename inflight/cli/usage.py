"""`inflight usage`: what tenants have used, as a table, CSV with FOCUS columns, or OpenCost's custom costs.

FOCUS is the FinOps Open Cost and Usage Specification (https://focus.finops.org), version 1.2: its mandatory and
recommended columns, and those of the others that apply. Columns that it does not define begin with `x_`, tags with
`inflight/`. A line of usage is one row: its cost is that of its busy time.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from decimal import Decimal
from typing import Any

from rich.table import Table

from inflight.cli.console import EXIT_USAGE, CommandError, open_console
from inflight.cli.flags import add_connection_flags, connected
from inflight.cli.parser import CommandParser
from inflight.common.version import installed_version
from inflight.events import Resources
from inflight.statistics import TenantUsage, UsageLine

PROVIDER = "inflight"
HOUR_S = 3600
# The figures of a line behind its busy time, and those in the table with their columns.
FIGURES = (
    *("seat_s", "block_s", "computed_prompt_tokens", "cached_prompt_tokens", "output_tokens"),
    *("wasted_draft_tokens", "recomputed_tokens"),
)
# What executors whose engine is vLLM do not report.
NOT_FROM_VLLM = ("busy_s", "block_s", "wasted_draft_tokens", "recomputed_tokens")
SHOWN = {
    "seat_s": "seat s",
    "computed_prompt_tokens": "prompt",
    "cached_prompt_tokens": "cached",
    "output_tokens": "output",
}


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    flags = _parser().parse_args(argv)
    since, until = (_day(name, getattr(flags, name)) for name in ("since", "until"))
    with connected(flags) as client:
        usage = client.usage(since=since, until=until, model=flags.model or "", tenant=flags.tenant or "")
    if flags.json:
        lines = [{**asdict(line), "used": _figures(line.used)} for line in usage.lines]
        print(json.dumps({**asdict(usage), "lines": lines}))
    elif flags.csv:
        print(focus_csv(usage), end="")
    elif flags.opencost:
        print(json.dumps(open_cost(usage, since, until)))
    else:
        open_console().print(usage_table(usage))
    if (note := incompleteness(usage, since)) and not flags.json:
        print(note, file=sys.stderr)
    return 0


def incompleteness(usage: TenantUsage, since: str) -> str:
    """Returns from when the figures are complete, if that is after the first day; `since` empty: today."""
    if usage.complete_since_s is None:
        return ""
    complete = datetime.datetime.fromtimestamp(usage.complete_since_s, datetime.UTC)
    first = datetime.date.fromisoformat(since) if since else datetime.datetime.now(datetime.UTC).date()
    if complete.date() < first:
        return ""
    return f"complete since {complete:%Y-%m-%d %H:%M} UTC; the ledger has no usage from before, or has lost it"


def usage_table(usage: TenantUsage) -> Table:
    """Returns a table with a row for each model with its adapter, tenant and class, summed over the days, and their
    sum."""
    rows: dict[tuple[str, str, str], list[UsageLine]] = {}
    for line in usage.lines:
        model = f"{line.model}:{line.adapter}" if line.adapter else line.model
        rows.setdefault((model, _tenant(line), line.priority), []).append(line)
    table = Table(box=None, header_style="dim")
    for heading in ("model", "tenant", "class"):
        table.add_column(heading, overflow="fold")
    for heading in ("busy s", *SHOWN.values(), usage.currency):
        table.add_column(heading, justify="right", no_wrap=True)
    for names, lines in rows.items():
        table.add_row(*names, *_summed(lines), style="dim" if lines[0].is_system else "")
    table.add_row("sum", "", "", *_summed(usage.lines), style="bold")
    return table


def _summed(lines: Sequence[UsageLine]) -> list[str]:
    costs = [line.cost for line in lines if line.cost is not None]
    figures = [f"{sum(getattr(line.used, name) for line in lines):.0f}" for name in SHOWN]
    known = [line.used.busy_s for line in lines if _is_measured(line.used)]
    busy_s = f"{sum(known):.3f}" if known else "-"
    return [busy_s, *figures, f"{sum(costs):.4f}" if costs else "-"]


def _is_measured(used: Resources) -> bool:
    """Returns whether the executors told their busy time; those with vLLM do not."""
    return used.busy_s > 0 or not used.output_tokens


def _figures(used: Resources) -> dict[str, float | None]:
    """Returns the figures by name; None: unknown."""
    figures: dict[str, float | None] = asdict(used)
    return figures if _is_measured(used) else figures | dict.fromkeys(NOT_FROM_VLLM)


def focus_csv(usage: TenantUsage) -> str:
    """Returns CSV text with a header. Without a price, costs and prices are 0, as FOCUS wants numbers."""
    text = io.StringIO()
    rows = [_focus_row(line, usage.currency) for line in usage.lines]
    writer = csv.DictWriter(text, list(_focus_row(_EMPTY, "")), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _focus_row(line: UsageLine, currency: str) -> dict[str, Any]:
    begin, end = _period(line.day)
    month_begin, month_end = _month(line.day)
    cost, hours = _decimal(line.cost or 0.0), _decimal(line.used.busy_s / HOUR_S)
    unit_price, sku = _decimal(_price(line) or 0.0), line.executor_class or "executor"
    tags = {f"{PROVIDER}/{name}": value for name, value in _labels(line).items() if value}
    return {
        "AvailabilityZone": "",
        "BilledCost": cost,
        "BillingAccountId": PROVIDER,
        "BillingAccountName": PROVIDER,
        "BillingCurrency": currency,
        "BillingPeriodStart": month_begin,
        "BillingPeriodEnd": month_end,
        "ChargeCategory": "Usage",
        "ChargeClass": "",
        "ChargeDescription": _description(line),
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": begin,
        "ChargePeriodEnd": end,
        "ConsumedQuantity": hours,
        "ConsumedUnit": "Hours",
        "ContractedCost": cost,
        "ContractedUnitPrice": unit_price,
        "EffectiveCost": cost,
        "InvoiceId": "",
        "InvoiceIssuerName": PROVIDER,
        "ListCost": cost,
        "ListUnitPrice": unit_price,
        "PricingCategory": "Standard",
        "PricingQuantity": hours,
        "PricingUnit": "Hours",
        "ProviderName": PROVIDER,
        "PublisherName": PROVIDER,
        "ResourceId": line.model,
        "ResourceName": line.adapter or line.model,
        "ResourceType": "Model",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": PROVIDER,
        "ServiceSubcategory": "Generative AI",
        "SkuId": sku,
        "SkuMeter": "Busy Time",
        "SkuPriceDetails": json.dumps({"x_ExecutorClass": sku}),
        "SkuPriceId": sku,
        "SubAccountId": _tenant(line),
        "SubAccountName": _tenant(line),
        "Tags": json.dumps(tags),
        **{f"x_{name}": "" if value is None else _decimal(value) for name, value in _figures(line.used).items()},
    }


def open_cost(usage: TenantUsage, since: str, until: str) -> dict[str, Any]:
    """Returns a CustomCostResponse of OpenCost in the JSON form of protobuf. A line has no cost without a price."""
    days = [line.day for line in usage.lines]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {
        "costSource": "ai_inference",
        "domain": PROVIDER,
        "version": installed_version(),
        "currency": usage.currency,
        "start": _period(since or min(days, default=today))[0],
        "end": _period(until or max(days, default=today))[1],
        "costs": [_custom_cost(line) for line in usage.lines],
    }


def _custom_cost(line: UsageLine) -> dict[str, Any]:
    cost, hours = line.cost or 0.0, line.used.busy_s / HOUR_S
    figures = _figures(line.used)
    identity = (line.day, line.model, _tenant(line), line.priority, line.adapter, line.executor_class)
    return {
        "id": "/".join(identity),
        "accountName": _tenant(line),
        "chargeCategory": "Usage",
        "description": _description(line),
        "resourceName": line.adapter or line.model,
        "resourceType": "model",
        "providerId": line.model,
        "billedCost": cost,
        "listCost": cost,
        "listUnitPrice": _price(line) or 0.0,
        "usageQuantity": hours,
        "usageUnit": "Hours",
        "labels": _labels(line) | {name: f"{figures[name]:g}" for name in FIGURES if figures[name] is not None},
        "extendedAttributes": {
            "subAccountId": _tenant(line),
            "subAccountName": _tenant(line),
            "serviceName": PROVIDER,
            "serviceCategory": "AI and Machine Learning",
            "skuId": line.executor_class,
        },
    }


def _decimal(value: float) -> str:
    """Returns a number without an exponent."""
    return f"{Decimal(repr(value)):f}"


def _price(line: UsageLine) -> float | None:
    """Returns the price of an hour, without the last digits, in which the division is not exact."""
    hours = line.used.busy_s / HOUR_S
    return float(f"{line.cost / hours:.10g}") if line.cost is not None and hours else None


def _labels(line: UsageLine) -> dict[str, str]:
    return {"model": line.model, "class": line.priority, "adapter": line.adapter, "executor_class": line.executor_class}


def _description(line: UsageLine) -> str:
    what = "not charged to a tenant" if line.is_system else f"class {line.priority}"
    return f"busy time of {line.executor_class or 'executors'} for {line.model}, {what}"


def _tenant(line: UsageLine) -> str:
    return "(system)" if line.is_system else line.tenant


def _period(day: str) -> tuple[str, str]:
    """Returns the beginning of a day and of the next one, as FOCUS and protobuf write times."""
    begin = datetime.date.fromisoformat(day)
    return _time(begin), _time(begin + datetime.timedelta(days=1))


def _month(day: str) -> tuple[str, str]:
    begin = datetime.date.fromisoformat(day).replace(day=1)
    return _time(begin), _time((begin + datetime.timedelta(days=31)).replace(day=1))


def _time(day: datetime.date) -> str:
    return f"{day.isoformat()}T00:00:00Z"


_EMPTY = UsageLine("1970-01-01", "", "", "", "", "", False, Resources(0.0, 0.0, 0.0, 0, 0, 0, 0, 0), None)


def _day(name: str, text: str | None) -> str:
    try:
        return "" if text is None else datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise CommandError(f"--{name}: {text!r} is not a day, such as 2026-11-30", EXIT_USAGE) from None


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="inflight usage",
        description="Prints what tenants have used: an operator sees every tenant, any other caller its own.",
    )
    parser.add_argument("--since", metavar="DAY", help="first day, YYYY-MM-DD, UTC (default: today)")
    parser.add_argument("--until", metavar="DAY", help="last day (default: today)")
    parser.add_argument("--model", metavar="NAME", help="only this model")
    parser.add_argument("--tenant", metavar="NAME", help="only this tenant")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print CSV with the columns of FOCUS 1.2")
    form.add_argument("--opencost", action="store_true", help="print OpenCost's custom costs (JSON)")
    form.add_argument("--json", action="store_true", help="print JSON")
    add_connection_flags(parser)
    return parser
