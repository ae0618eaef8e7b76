"""The record format of routers of two versions in one Redis: the number in the keys names the format."""

from __future__ import annotations

import hashlib
import re

from inflight.router.ledger.codec import parse_event
from inflight.router.ledger.keys import FINGERPRINT, FORMAT, PoolKeys
from inflight.router.ledger.scripts import schema
from inflight.router.ledger.types import Placement

PACKED = re.compile(r"struct\.pack\('.*'.*\)")


def packings() -> str:
    """How each record is packed: its layout and fields."""
    return "\n".join(PACKED.findall("".join(schema.record_functions(*record) for record in schema.RECORDS.items())))


def test_records_are_packed_as_their_format_says() -> None:
    found = hashlib.sha256(packings().encode()).hexdigest()[:16]
    assert found == FINGERPRINT, (
        f"records are packed differently than in format {FORMAT}: raise FORMAT in router/ledger/keys.py, unless it was "
        f"raised since the last release, and set FINGERPRINT to {found}"
    )


def test_format_is_in_every_key() -> None:
    assert PoolKeys("model").key("requests") == f"inflight:{FORMAT}:{{model}}:requests"


def test_mail_of_an_older_router_may_lack_what_came_later() -> None:
    mail = {"kind": "placed", "request_id": "r", "attempt": "2", "executor_id": "x", "generation": "7"}
    event = parse_event(mail)
    assert isinstance(event, Placement)
    assert event == Placement("r", 2, "x", 7)
    assert (event.blocks, event.suspect) == (0, False)
