"""What every specimen brings undisturbed: made by the same system before anything goes wrong, kept for the next run.

A greedy token is the likeliest one, and two that are as likely but for rounding may swap places in another batch, or
where their beginning is computed as a prompt. Which requests hold such a tie is found out here: each is generated in
two companies and, where it is greedy, once more from two thirds on. Those that differ are left out.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.chaos.specimens import Expected, Kind, Specimen, continued, with_stop
from common.disk_cache import cache_folder
from inflight.aio import Client

FEW_AT_ONCE = 4
MANY_AT_ONCE = 16
# Behind so much of the output it is computed as a prompt, in the third try.
CONTINUE_BEHIND = (0.33, 0.67)


@dataclass(frozen=True, slots=True)
class Reference:
    """What specimens bring, and how many were left out for a tie."""

    expected: Mapping[Specimen, Expected]
    num_left_out: int = 0


async def load_or_make(client: Client, wanted: Sequence[Specimen], system: str) -> Reference:
    """The reference of these specimens and one with a stop text for each third; `system` names model and arithmetic."""
    described = json.dumps([system, *(asdict(specimen) for specimen in wanted)], default=str)
    path = cache_folder() / "chaos" / f"{hashlib.sha256(described.encode()).hexdigest()[:24]}.json"
    kept = _read(path)
    if kept is None:
        kept = await _make(client, wanted)
        _write(path, kept)
    return kept


async def _make(client: Client, wanted: Sequence[Specimen]) -> Reference:
    few = await _generate(client, wanted, FEW_AT_ONCE)
    many = await _generate(client, list(reversed(wanted)), MANY_AT_ONCE)
    steady = {specimen: expected for specimen, expected in few.items() if many[specimen] == expected}
    fragile = await _fragile(client, steady)
    steady = {specimen: expected for specimen, expected in steady.items() if specimen not in fragile}
    stopped = [with_stop(specimen, expected) for specimen, expected in list(steady.items())[::3]]
    stops = await _generate(client, [specimen for specimen in stopped if specimen is not None], MANY_AT_ONCE)
    return Reference(steady | stops, len(wanted) - len(steady))


async def _fragile(client: Client, steady: Mapping[Specimen, Expected]) -> set[Specimen]:
    """Greedy specimens whose output depends on which part of it was computed as a prompt."""
    parts: dict[Specimen, tuple[Specimen, tuple[int, ...]]] = {}
    for specimen, expected in steady.items():
        if specimen.kind is Kind.SAMPLED:
            continue  # what is drawn at an offset of the output is another number there in a prompt
        with_ids = specimen
        if specimen.prompt is not None:
            with_ids = replace(specimen, prompt=None, prompt_ids=tuple(await client.tokenize(specimen.prompt)))
        for share in CONTINUE_BEHIND:
            num_tokens = int(share * len(expected.token_ids))
            if 0 < num_tokens < len(expected.token_ids):
                parts[continued(with_ids, expected, num_tokens)] = (specimen, expected.token_ids[num_tokens:])
    got = await _generate(client, list(parts), MANY_AT_ONCE)
    return {whole for part, (whole, due) in parts.items() if got[part].token_ids != due}


async def _generate(client: Client, wanted: Sequence[Specimen], at_once: int) -> dict[Specimen, Expected]:
    """What each brings, so many at a time."""
    seats = asyncio.Semaphore(at_once)

    async def generate(specimen: Specimen) -> Expected:
        async with seats:
            completion = await client.send(specimen.request(want_token_ids=True)).result()
        assert completion.finish_reason is not None
        return Expected(completion.token_ids, completion.text, completion.finish_reason.value)

    results = await asyncio.gather(*(generate(specimen) for specimen in wanted))
    return dict(zip(wanted, results, strict=True))


def _read(path: Path) -> Reference | None:
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    expected = {_specimen(entry["specimen"]): _expected(entry["expected"]) for entry in content["expected"]}
    return Reference(expected, content["num_left_out"])


def _write(path: Path, reference: Reference) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = [
        {"specimen": asdict(specimen) | {"kind": specimen.kind.value}, "expected": asdict(expected)}
        for specimen, expected in reference.expected.items()
    ]
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"num_left_out": reference.num_left_out, "expected": entries}), encoding="utf-8")
    partial.replace(path)


def _specimen(values: dict[str, Any]) -> Specimen:
    kind, prompt_ids = Kind(values.pop("kind")), values.pop("prompt_ids")
    return Specimen(**values, kind=kind, prompt_ids=None if prompt_ids is None else tuple(prompt_ids))


def _expected(values: dict[str, Any]) -> Expected:
    return Expected(tuple(values["token_ids"]), values["text"], values["finish_reason"])
