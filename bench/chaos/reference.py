"""The undisturbed output of every sample request: made by the same system before the faults, kept for the next run.

A greedy token is the likeliest one. Two that are equally likely except for rounding may swap in another batch, or
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

from pydantic import TypeAdapter

from inflight import AsyncClient
from inflight.bench.chaos.requests import Expected, SampleKind, SampleRequest, continued, with_stop
from inflight.common.disk_cache import cache_folder

# What is kept in a file: how many were left out, and each sample with its output.
KEPT = TypeAdapter(tuple[int, list[tuple[SampleRequest, Expected]]])
FEW_AT_ONCE = 4
MANY_AT_ONCE = 16
# Behind so much of the output it is computed as a prompt, in the third try.
CONTINUE_BEHIND = (0.33, 0.67)


@dataclass(frozen=True, slots=True)
class Reference:
    """What samples bring, and how many were left out for a tie."""

    expected: Mapping[SampleRequest, Expected]
    num_left_out: int = 0


async def load_or_make(client: AsyncClient, wanted: Sequence[SampleRequest], system: str) -> Reference:
    """Returns the reference of these samples and one with a stop text for each third; `system` names model and
    arithmetic."""
    described = json.dumps([system, *(asdict(sample) for sample in wanted)], default=str)
    path = cache_folder() / "chaos-samples" / f"{hashlib.sha256(described.encode()).hexdigest()[:24]}.json"
    kept = _read(path)
    if kept is None:
        kept = await _make(client, wanted)
        _write(path, kept)
    return kept


async def _make(client: AsyncClient, wanted: Sequence[SampleRequest]) -> Reference:
    few = await _generate(client, wanted, FEW_AT_ONCE)
    many = await _generate(client, list(reversed(wanted)), MANY_AT_ONCE)
    steady = {sample: expected for sample, expected in few.items() if many[sample] == expected}
    fragile = await _fragile(client, steady)
    steady = {sample: expected for sample, expected in steady.items() if sample not in fragile}
    stopped = [with_stop(sample, expected) for sample, expected in list(steady.items())[::3]]
    stops = await _generate(client, [sample for sample in stopped if sample is not None], MANY_AT_ONCE)
    return Reference(steady | stops, len(wanted) - len(steady))


async def _fragile(client: AsyncClient, steady: Mapping[SampleRequest, Expected]) -> set[SampleRequest]:
    """Greedy samples whose output depends on which part of it was computed as a prompt."""
    parts: dict[SampleRequest, tuple[SampleRequest, tuple[int, ...]]] = {}
    for sample, expected in steady.items():
        if sample.kind is SampleKind.SAMPLED:
            continue  # what is drawn at an offset of the output is another number there in a prompt
        with_ids = sample
        if sample.prompt is not None:
            with_ids = replace(sample, prompt=None, prompt_ids=tuple(await client.tokenize(sample.prompt)))
        for share in CONTINUE_BEHIND:
            num_tokens = int(share * len(expected.token_ids))
            if 0 < num_tokens < len(expected.token_ids):
                parts[continued(with_ids, expected, num_tokens)] = (sample, expected.token_ids[num_tokens:])
    got = await _generate(client, list(parts), MANY_AT_ONCE)
    return {whole for part, (whole, due) in parts.items() if got[part].token_ids != due}


async def _generate(
    client: AsyncClient, wanted: Sequence[SampleRequest], at_once: int
) -> dict[SampleRequest, Expected]:
    """What each brings, so many at a time."""
    seats = asyncio.Semaphore(at_once)

    async def generate(sample: SampleRequest) -> Expected:
        async with seats:
            # Drafts of the executors must change nothing.
            completion = await client.send(sample.request(want_token_ids=True, max_drafts=0)).result()
        assert completion.finish_reason is not None
        return Expected(completion.token_ids, completion.text, completion.finish_reason.value)

    results = await asyncio.gather(*(generate(sample) for sample in wanted))
    return dict(zip(wanted, results, strict=True))


def _read(path: Path) -> Reference | None:
    if not path.is_file():
        return None
    num_left_out, expected = KEPT.validate_json(path.read_bytes())
    return Reference(dict(expected), num_left_out)


def _write(path: Path, reference: Reference) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(KEPT.dump_json((reference.num_left_out, list(reference.expected.items()))))
    partial.replace(path)
