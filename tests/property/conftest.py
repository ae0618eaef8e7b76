"""What a comparison outside a test module found is shown, too."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.property.ledger_comparison", "tests.property.store_machine")
