"""Agreement of docs/kserve.md with the KServe service: it lists every name, and no others."""

from __future__ import annotations

import re

from inflight.router.kserve import translation
from inflight.router.kserve.options import OPTIONS, SAMPLING_PARAMETERS
from tests.contract.test_imports import REPOSITORY

PAGE = REPOSITORY / "docs" / "kserve.md"


def names_under(heading: str) -> dict[str, bool]:
    """The names in the first column of the table behind a heading, and whether they are marked as parameters."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")
    (table,) = re.findall(r"(?:^\|.*\n)+", rest.partition("\n## ")[0], re.MULTILINE)
    names: dict[str, bool] = {}
    for row in table.splitlines()[2:]:
        pending: list[str] = []
        for name, mark in re.findall(r"`(\w+)`|(\*p\*)", row.split("|")[1]):
            if mark:
                names |= dict.fromkeys(pending, True)
                pending = []
            else:
                pending.append(name)
        names |= dict.fromkeys(pending, False)
    return names


def test_every_tensor_of_a_request_is_on_the_page() -> None:
    known = {name: option.is_sampling for option in OPTIONS for name in option.names}
    assert names_under("Tensors of a request") == {**known, SAMPLING_PARAMETERS: False}


def test_every_tensor_of_a_response_is_on_the_page() -> None:
    assert names_under("Tensors of a response").keys() == set(translation.OUTPUTS)
