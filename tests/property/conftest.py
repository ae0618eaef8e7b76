"""Assertion rewriting for the comparisons outside test modules, so that their values are shown."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.property.ledger_comparison", "tests.property.store_machine")
