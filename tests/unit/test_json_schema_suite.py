"""JSON-Schema-Test-Suite: what a grammar accepts is valid; what is valid is accepted, apart from a few listed cases."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.text.schema_suite import NotFetchedError, fetched_suite, results

pytestmark = pytest.mark.slow

# Valid values that are never generated. It does no harm: the output satisfies the schema.
REJECTED_VALID = {
    "draft2020-12": {
        "format.json": (10, "formats are enforced here; the draft only allows that"),
        "optional/format/date-time.json": (2, "leap seconds are left out"),
        "optional/format/email.json": (5, "quoted local parts and address literals are left out"),
        "optional/format/hostname.json": (1, "hyphens in a row are left out"),
        "optional/format/ipv6.json": (4, "IPv4 within IPv6 is left out"),
        "optional/format/time.json": (6, "leap seconds are left out"),
    },
    "draft7": {
        "optional/format/date-time.json": (2, "leap seconds are left out"),
        "optional/format/hostname.json": (1, "hyphens in a row are left out"),
        "optional/format/ipv6.json": (4, "IPv4 within IPv6 is left out"),
        "optional/format/time.json": (6, "leap seconds are left out"),
    },
}
# Of 1,906 and 1,465 cases; the others are refused.
LEAST_RIGHT = {"draft2020-12": 900, "draft7": 840}


@pytest.mark.parametrize("draft", ["draft2020-12", "draft7"])
def test_what_a_grammar_accepts_is_valid(draft: str) -> None:
    try:
        suite = fetched_suite()
    except NotFetchedError as error:
        pytest.skip(f"the suite cannot be fetched: {error}")
    counts: Counter[str] = Counter()
    accepted_invalid, rejected_valid = [], {}
    for name, result in results(suite, draft):
        counts += result.counts
        accepted_invalid += [f"{name}: {text}" for text in result.accepted_invalid]
        if result.rejected_valid:
            rejected_valid[name] = len(result.rejected_valid)
    assert accepted_invalid == []
    assert rejected_valid == {name: number for name, (number, _) in REJECTED_VALID[draft].items()}
    assert counts["right"] >= LEAST_RIGHT[draft]
