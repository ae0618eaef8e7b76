"""Arbitrary admission files: each is accepted, or refused with lines that are in it."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from inflight.router.config.tenants import NO_CONFIG, TenantTable, parse_tenants
from inflight.router.config.watched_file import ContentError, Problem

SERVED = frozenset({"m", "n"})
HEADERS = ("[tenants]", "[tenants.a]", '[tenants."b c"]', "[tenants.default]", "[variants.v]", "[variants]", "[x.'y']")
VALUES = (
    "0",
    "1",
    "-1",
    "2.5",
    "nan",
    "inf",
    "true",
    '"1"',
    "[1]",
    "{ weight = 0 }",
    "'''\n\"\\q\" = 1\n'''",
    "",
    "1e400",
)
KEYS = (
    *TenantTable.model_fields,
    "unknown_tenants",
    "m",
    "n",
    "other",
    "tenants.a.weight",
    '"quoted.key"',
    "'x'.y",
    "=",
)

lines = st.one_of(
    st.sampled_from(HEADERS),
    st.builds("{} = {}".format, st.sampled_from(KEYS), st.sampled_from(VALUES)),
    st.text(max_size=12),
)


@given(st.lists(lines, max_size=8))
def test_file_is_understood_or_refused_with_its_lines(written: list[str]) -> None:
    source = "\n".join(written)
    problems: tuple[Problem, ...] = ()
    try:
        config = parse_tenants(source, SERVED)
    except ContentError as error:
        config, problems = NO_CONFIG, error.problems
    assert all(1 <= (problem.line or 0) <= source.count("\n") + 1 for problem in problems)
    for limits in config.tenants.values():
        assert 0 < limits.weight < math.inf
        assert limits.request_burst >= 1
        assert limits.token_burst >= 1
    for variants in config.variants.values():
        assert variants
        assert all(variant.model in SERVED and variant.weight > 0 for variant in variants)
