"""The requests of the load, and the expected output of each. Pure.

There are few different ones, so that each can be generated undisturbed before; the load sends them again and again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from inflight.requests import generate_request
from inflight.v1 import inference_pb2

TEXT = (
    "the city bus never waits for its slowest passenger and a seat that is free is taken at the next stop while rain "
    "falls on seven old bridges where none counts how many lanterns burn or why this river runs north in spring"
)


class SampleKind(Enum):
    """The form of a prompt and of its output."""

    IDS = "ids"
    TEXT = "text"
    STOP = "stop"
    SAMPLED = "sampled"


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One request, apart from its id and key. Exactly one of `prompt` and `prompt_ids` is set. `model` may name an
    adapter, as `MODEL:ADAPTER`; empty: the only model."""

    name: str
    kind: SampleKind
    max_tokens: int
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    stop: str | None = None
    seed: int | None = None
    model: str = ""

    @property
    def wants_ids(self) -> bool:
        """Whether the client reads token ids. The text it always reads."""
        return self.kind is not SampleKind.TEXT

    def request(self, **options: Any) -> inference_pb2.GenerateRequest:
        sampling: dict[str, Any] = {"temperature": 0.0}
        if self.seed is not None:
            sampling = {"temperature": 1.0, "top_k": 40, "top_p": 0.95, "seed": self.seed}
        given = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "want_token_ids": self.wants_ids,
            "stop": self.stop,
            **sampling,
            **options,
        }
        return generate_request(self.prompt, chat=None, token_ids=self.prompt_ids, options=given)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a sample brings when nothing goes wrong. `token_ids` also where the client does not read them."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class LengthRanges:
    """Of prompts and outputs, in tokens, [least, most]."""

    prompt: tuple[int, int]
    output: tuple[int, int]


def sample_requests(
    number: int, lengths: LengthRanges, vocabulary_size: int, model: str = ""
) -> Iterator[SampleRequest]:
    """So many requests without a stop text, of every kind in turn; always the same, for every model."""
    rng = random.Random("samples")
    words = TEXT.split()
    for index in range(number):
        kind = (SampleKind.IDS, SampleKind.TEXT, SampleKind.IDS, SampleKind.SAMPLED)[index % 4]
        num_prompt_tokens = rng.randint(*lengths.prompt)
        max_tokens = rng.randint(*lengths.output)
        seed = rng.randrange(2**31)
        name = f"{kind.value}-{index}"
        if kind is SampleKind.TEXT:
            prompt = " ".join(rng.choice(words) for _ in range(max(1, num_prompt_tokens // 4)))
            yield SampleRequest(name, kind, max_tokens, prompt=prompt, model=model)
        else:
            ids = tuple(rng.randrange(vocabulary_size - 1) for _ in range(num_prompt_tokens))
            given_seed = seed if kind is SampleKind.SAMPLED else None
            yield SampleRequest(name, kind, max_tokens, prompt_ids=ids, seed=given_seed, model=model)


def with_stop(sample: SampleRequest, expected: Expected) -> SampleRequest | None:
    """Returns the same request with a stop text from its output, well after its beginning; None if there is none.

    The text may not hold a character that stands for broken ones: what follows might complete it.
    """
    text = expected.text
    for at in range(len(text) // 2, len(text) - 3):
        stop = text[at : at + 3]
        if "\N{REPLACEMENT CHARACTER}" not in stop and text.index(stop) == at:
            return replace(sample, name=f"stop-{sample.name}", kind=SampleKind.STOP, stop=stop)
    return None


def continued(sample: SampleRequest, expected: Expected, num_tokens: int) -> SampleRequest:
    """Returns the rest of a greedy request as a request of its own: its beginning is computed as a prompt."""
    assert sample.prompt_ids is not None
    return SampleRequest(
        f"{sample.name} behind {num_tokens}",
        SampleKind.IDS,
        len(expected.token_ids) - num_tokens,
        prompt_ids=sample.prompt_ids + expected.token_ids[:num_tokens],
        model=sample.model,
    )
