"""The board's colours in both themes: text and marks stand out as WCAG AA asks, also where no browser measures them."""

from __future__ import annotations

import re
from importlib import resources

import pytest

PAIR = re.compile(r"--([\w-]+): light-dark\(#([0-9a-f]{6}), #([0-9a-f]{6})\);")
STYLE = (resources.files("inflight.router.dashboard") / "static" / "board.css").read_text(encoding="utf-8")
COLOURS = {name: (light, dark) for name, light, dark in PAIR.findall(STYLE)}
TENANTS = [f"t{number}" for number in range(12)] + ["t-other"]
TEXT, GRAPHICS = 4.5, 3.0


def luminance(colour: str) -> float:
    """Relative luminance as WCAG defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(
    ("front", "back", "least"),
    [
        *(("on-tenant", tenant, TEXT) for tenant in TENANTS),
        *((tenant, "card", TEXT) for tenant in TENANTS),
        *((tenant, "bus-floor", GRAPHICS) for tenant in TENANTS),
        *((text, ground, TEXT) for text in ("ink", "soft") for ground in ("card", "paper")),
        *((state, "card", TEXT) for state in ("good", "warn", "bad", "accent")),
        ("on-accent", "accent", TEXT),
        ("edge", "card", GRAPHICS),
        ("p50", "card", GRAPHICS),
        ("p99", "card", GRAPHICS),
        *((f"stage-{stage}", "card", GRAPHICS) for stage in ("queued", "placed", "prefill", "decode", "preempted")),
        *(("on-tenant", severity, TEXT) for severity in ("good", "warn", "bad", "soft")),
    ],
)
def test_colours_stand_out(front: str, back: str, least: float, theme: int) -> None:
    assert contrast(COLOURS[front][theme], COLOURS[back][theme]) >= least
