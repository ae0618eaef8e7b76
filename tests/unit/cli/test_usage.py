"""`inflight usage`: the table, FOCUS's columns and OpenCost's custom costs."""

from __future__ import annotations

import csv
import datetime
import io
import json
import re
from collections.abc import Callable

import pytest

from inflight.cli.main import main
from inflight.cli.usage import focus_csv, open_cost
from inflight.statistics import decode_usage
from inflight.v1 import inference_pb2, types_pb2
from tests.unit.scripted_router import ScriptedRouter, asked

# Columns of FOCUS 1.2 by what it wants of them in a row of usage that is no correction (specification/columns at its
# tag v1.2). The others apply to what is not here: several types of accounts, currencies or regions, capacity
# reservations, commitment discounts.
FOCUS_NUMBERS = {
    *("BilledCost", "ConsumedQuantity", "ContractedCost", "ContractedUnitPrice", "EffectiveCost", "ListCost"),
    *("ListUnitPrice", "PricingQuantity"),
}
FOCUS_TIMES = {"BillingPeriodEnd", "BillingPeriodStart", "ChargePeriodEnd", "ChargePeriodStart"}
FOCUS_TEXTS = {
    *(
        "BillingAccountId",
        "BillingAccountName",
        "ChargeDescription",
        "ConsumedUnit",
        "InvoiceIssuerName",
        "PricingUnit",
    ),
    *(
        "ProviderName",
        "PublisherName",
        "ResourceId",
        "ResourceName",
        "ResourceType",
        "ServiceName",
        "SkuId",
        "SkuMeter",
    ),
    *("SkuPriceId", "SubAccountId", "SubAccountName"),
}
FOCUS_ONE_OF = {
    "ChargeCategory": {"Usage", "Purchase", "Tax", "Credit", "Adjustment"},
    "ChargeFrequency": {"One-Time", "Recurring", "Usage-Based"},
    "PricingCategory": {"Standard", "Dynamic", "Committed", "Other"},
    "ServiceCategory": {"AI and Machine Learning"},
    "ServiceSubcategory": {"AI Platforms", "Generative AI", "Machine Learning", "Other (AI and Machine Learning)"},
}
FOCUS_OBJECTS = {"SkuPriceDetails": "x_", "Tags": "inflight/"}
FOCUS_NULL = {"AvailabilityZone", "ChargeClass", "InvoiceId"}
FOCUS = {*FOCUS_NUMBERS, *FOCUS_TIMES, *FOCUS_TEXTS, *FOCUS_ONE_OF, *FOCUS_OBJECTS, *FOCUS_NULL, "BillingCurrency"}
HOUR_NS = 3_600_000_000_000
LINES = (
    inference_pb2.UsageLine(
        day="2026-12-31",
        model="smol",
        tenant="search, team",
        priority=types_pb2.PRIORITY_CLASS_BATCH,
        adapter="style",
        executor_class="h200",
        used=types_pb2.ResourceUsage(busy_ns=2 * HOUR_NS, seat_us=5_000_000, output_tokens=1234),
        cost=7.0,
    ),
    inference_pb2.UsageLine(
        day="2026-12-31", model="smol", is_system=True, used=types_pb2.ResourceUsage(busy_ns=HOUR_NS // 2)
    ),
)
# A millisecond, and a line of executors that do not tell their busy time.
SMALL = inference_pb2.UsageLine(
    day="2026-02-01", model="smol", tenant="t", used=types_pb2.ResourceUsage(busy_ns=10**6), cost=1e-6
)
UNKNOWN = inference_pb2.UsageLine(
    day="2026-02-28", model="v", tenant="t", used=types_pb2.ResourceUsage(output_tokens=5)
)
RESPONSE = inference_pb2.GetUsageResponse(lines=LINES, currency="EUR")


def test_table_has_lines_and_sums(output: Callable[..., str], router: ScriptedRouter) -> None:
    router.usage = RESPONSE
    shown = output("usage", "--since", "2026-12-01", "--until", "2026-12-31", "--tenant", "search, team")

    (request,) = asked(router)
    assert (request.since, request.until, request.tenant) == ("2026-12-01", "2026-12-31", "search, team")
    rows = [row.split() for row in shown.splitlines()]
    assert rows[1] == ["smol:style", "search,", "team", "batch", "7200.000", "5", "0", "0", "1234", "7.0000"]
    assert rows[2] == ["smol", "(system)", "1800.000", "0", "0", "0", "0", "-"]
    assert rows[3] == ["sum", "9000.000", "5", "0", "0", "1234", "7.0000"]


@pytest.mark.parametrize(
    ("since", "complete_since", "note"),
    [
        ("2026-12-01", "2026-12-05T14:03", "complete since 2026-12-05 14:03 UTC"),
        ("2026-12-01", "2026-12-01T00:00", "complete since 2026-12-01 00:00 UTC"),
        ("2026-12-01", "2026-11-30T23:59", ""),
        ("2026-12-01", None, ""),
    ],
)
def test_says_from_when_the_figures_are_complete(
    address: str,
    router: ScriptedRouter,
    capsys: pytest.CaptureFixture[str],
    since: str,
    complete_since: str | None,
    note: str,
) -> None:
    router.usage = inference_pb2.GetUsageResponse()
    router.usage.CopyFrom(RESPONSE)
    if complete_since is not None:
        time = datetime.datetime.fromisoformat(f"{complete_since}:00+00:00")
        router.usage.complete_since_unix_ms = round(time.timestamp() * 1000)
    assert main(["usage", "--since", since, "--until", "2026-12-31", "--address", address]) == 0
    told = capsys.readouterr().err
    assert note in told
    assert bool(note) == ("complete since" in told)


def test_unknown_figures_of_vllm_are_not_zero(output: Callable[..., str], router: ScriptedRouter) -> None:
    used = types_pb2.ResourceUsage(seat_us=2_000_000, output_tokens=5, computed_prompt_tokens=3)
    router.usage = inference_pb2.GetUsageResponse(
        lines=[inference_pb2.UsageLine(day="2026-12-31", model="v", used=used)]
    )
    (line,) = json.loads(output("usage", "--json"))["lines"]
    unknown = {name for name, value in line["used"].items() if value is None}
    assert unknown == {"busy_s", "block_s", "wasted_draft_tokens", "recomputed_tokens"}
    assert (line["used"]["seat_s"], line["used"]["output_tokens"]) == (2.0, 5)
    row = output("usage").splitlines()[1].split()
    assert row[-6:] == ["-", "2", "3", "0", "5", "-"]
    (focus,) = csv.DictReader(io.StringIO(output("usage", "--csv")))
    assert (focus["x_busy_s"], focus["x_block_s"], focus["x_output_tokens"]) == ("", "", "5")
    (cost,) = json.loads(output("usage", "--opencost"))["costs"]
    assert "block_s" not in cost["labels"]


def test_json_has_every_figure(output: Callable[..., str], router: ScriptedRouter) -> None:
    router.usage = RESPONSE
    first, second = json.loads(output("usage", "--json"))["lines"]
    assert (first["used"]["busy_s"], first["used"]["output_tokens"], first["cost"]) == (7200.0, 1234, 7.0)
    assert (second["is_system"], second["cost"]) == (True, None)


def test_csv_satisfies_the_rules_of_focus() -> None:
    usage = decode_usage(inference_pb2.GetUsageResponse(lines=[*LINES, SMALL, UNKNOWN], currency="EUR"))
    rows = list(csv.DictReader(io.StringIO(focus_csv(usage))))
    assert len(rows) == 4
    names = list(rows[0])
    assert set(names[: len(FOCUS)]) == FOCUS
    assert all(name.startswith("x_") for name in names[len(FOCUS) :])
    for row in rows:
        numbers = {name: float(row[name]) for name in FOCUS_NUMBERS if re.fullmatch(r"\d+(\.\d+)?", row[name])}
        assert set(numbers) == FOCUS_NUMBERS
        assert numbers["ListUnitPrice"] * numbers["PricingQuantity"] == pytest.approx(numbers["ListCost"])
        assert numbers["ContractedUnitPrice"] * numbers["PricingQuantity"] == pytest.approx(numbers["ContractedCost"])
        assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row[name]) for name in FOCUS_TIMES)
        assert all(row[name].strip() for name in FOCUS_TEXTS)
        assert all(row[name] in values for name, values in FOCUS_ONE_OF.items())
        assert all(not row[name] for name in FOCUS_NULL)
        assert re.fullmatch("[A-Z]{3}", row["BillingCurrency"])
        for name, prefix in FOCUS_OBJECTS.items():
            found = json.loads(row[name])
            assert all(key.startswith(prefix) and isinstance(value, str) for key, value in found.items())


def test_csv_has_periods_costs_and_accounts(output: Callable[..., str], router: ScriptedRouter) -> None:
    router.usage = RESPONSE
    first, second = csv.DictReader(io.StringIO(output("usage", "--csv")))

    assert (first["ChargePeriodStart"], first["ChargePeriodEnd"]) == ("2026-12-31T00:00:00Z", "2027-01-01T00:00:00Z")
    assert (first["BillingPeriodStart"], first["BillingPeriodEnd"]) == ("2026-12-01T00:00:00Z", "2027-01-01T00:00:00Z")
    assert (float(first["BilledCost"]), float(first["ListUnitPrice"]), first["PricingUnit"]) == (7.0, 3.5, "Hours")
    assert (first["SubAccountName"], second["SubAccountName"]) == ("search, team", "(system)")
    assert json.loads(first["Tags"])["inflight/adapter"] == "style"
    assert (float(second["BilledCost"]), float(second["ListUnitPrice"])) == (0.0, 0.0)


def test_csv_without_lines_has_its_header() -> None:
    assert set(focus_csv(decode_usage(inference_pb2.GetUsageResponse())).strip().split(",")) >= FOCUS


def test_open_cost_gets_custom_costs() -> None:
    answer = open_cost(decode_usage(RESPONSE), "2026-12-01", "")

    assert (answer["domain"], answer["currency"]) == ("inflight", "EUR")
    assert (answer["start"], answer["end"]) == ("2026-12-01T00:00:00Z", "2027-01-01T00:00:00Z")
    first, second = answer["costs"]
    assert (first["billedCost"], first["usageQuantity"], first["usageUnit"]) == (7.0, 2.0, "Hours")
    assert first["labels"]["output_tokens"] == "1234"
    assert first["id"] != second["id"]
    assert json.loads(json.dumps(answer)) == answer


def test_day_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", "--since", "yesterday"]) == 2
    assert "--since: 'yesterday' is not a day" in capsys.readouterr().err
