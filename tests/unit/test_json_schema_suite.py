"""JSON-Schema-Test-Suite: what a grammar accepts is valid; what is valid is accepted, apart from a few listed cases."""

from __future__ import annotations

from collections import Counter

import pytest

from inflight.router.constraint.json_schema import FORMATS
from tests.support.text.schema_suite import NotFetchedError, fetched_suite, results

pytestmark = pytest.mark.slow

# Valid values that are never generated. It does no harm: the output satisfies the schema.
REJECTED_VALID = {
    "draft2020-12": {
        "optional/bignum.json": (2, "larger bounds are replaced by 2^53"),
        "format.json": (10, "formats are enforced here; the draft only allows that"),
        "optional/format/date-time.json": (2, "leap seconds are left out"),
        "optional/format/email.json": (5, "quoted local parts and address literals are left out"),
        "optional/format/hostname.json": (1, "hyphens in a row are left out"),
        "optional/format/ipv6.json": (4, "IPv4 within IPv6 is left out"),
        "optional/format/time.json": (6, "leap seconds are left out"),
    },
    "draft7": {
        "optional/bignum.json": (2, "larger bounds are replaced by 2^53"),
        "optional/format/date-time.json": (2, "leap seconds are left out"),
        "optional/format/hostname.json": (1, "hyphens in a row are left out"),
        "optional/format/ipv6.json": (4, "IPv4 within IPv6 is left out"),
        "optional/format/time.json": (6, "leap seconds are left out"),
    },
    "draft4": {
        "optional/bignum.json": (2, "larger bounds are replaced by 2^53"),
        "optional/format/date-time.json": (2, "leap seconds are left out"),
        "optional/format/hostname.json": (1, "hyphens in a row are left out"),
        "optional/format/ipv6.json": (4, "IPv4 within IPv6 is left out"),
    },
}
# Annotations that a validator may check, and 1.0, which is an integer in later drafts.
NOT_CHECKED = ("optional/content.json", "optional/zeroTerminatedFloats.json", "optional/format/")
CHECKED_FORMATS = tuple(f"optional/format/{name}.json" for name in sorted(FORMATS))
# Of 1,906, 1,465 and 863 cases; most others are refused.
LEAST_RIGHT = {"draft2020-12": 1150, "draft7": 1080, "draft4": 690}


@pytest.mark.parametrize("draft", ["draft2020-12", "draft7", "draft4"])
def test_what_a_grammar_accepts_is_valid(draft: str) -> None:
    try:
        suite = fetched_suite()
    except NotFetchedError as error:
        pytest.skip(f"the suite cannot be fetched: {error}")
    counts: Counter[str] = Counter()
    accepted_invalid, rejected_valid = [], {}
    for name, result in results(suite, draft):
        counts += result.counts
        if name.startswith(CHECKED_FORMATS) or not name.startswith(NOT_CHECKED):
            accepted_invalid += [f"{name}: {text}" for text in result.accepted_invalid]
        if result.rejected_valid:
            rejected_valid[name] = len(result.rejected_valid)
    assert accepted_invalid == []
    assert rejected_valid == {name: number for name, (number, _) in REJECTED_VALID[draft].items()}
    assert counts["right"] >= LEAST_RIGHT[draft]
