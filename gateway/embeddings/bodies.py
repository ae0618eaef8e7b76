"""Bodies of `/v1/embeddings` in OpenAI's form, of `/v1/rerank` in Cohere's and Jina's, and of `/v1/score` in vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from inflight.gateway.bodies import (
    MAX_INT32,
    MAX_PROMPT_VALUES,
    Body,
    Integer,
    PriorityNumber,
    Text,
    TokenIds,
)

# Parameters that are not implemented, with the values that have no effect.
UNSUPPORTED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "/v1/embeddings": {"truncate_prompt_tokens": (), "add_special_tokens": (True,)},
    "/v1/rerank": {"max_chunks_per_doc": (), "max_tokens_per_doc": (), "rank_fields": (), "truncate_prompt_tokens": ()},
    "/v1/score": {"truncate_prompt_tokens": (), "use_activation": (True,)},
}
# Lists of token ids, which are counted by themselves.
ID_LISTS = frozenset({"input"})


class CommonBody(Body):
    """Parameters of all three. Those of this project are at the end."""

    model: Annotated[str, Field(min_length=1)]
    user: Text | None = None
    priority: Literal["interactive", "standard", "batch"] | PriorityNumber | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None

    @property
    def unused(self) -> tuple[str, ...]:
        """Parameters without effect."""
        return ("user",) if self.user else ()


class EmbeddingBody(CommonBody):
    """`POST /v1/embeddings`."""

    input: str | TokenIds | list[str] | list[TokenIds]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Integer, Field(ge=1, le=MAX_INT32)] | None = None

    @model_validator(mode="after")
    def _check_number(self) -> EmbeddingBody:
        if isinstance(self.input, list) and self.input and isinstance(self.input[0], list):
            num_values = sum(len(one) for one in self.input if isinstance(one, list))
            if num_values > MAX_PROMPT_VALUES:
                raise ValueError(f"input: has {num_values} ids; at most {MAX_PROMPT_VALUES} are allowed")
        return self

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        """The inputs as a list."""
        given: Any = self.input
        return given if isinstance(given, list) and not (given and isinstance(given[0], int)) else [given]


class TextDocument(Body):
    """A document as an object."""

    text: str


class RerankBody(CommonBody):
    """`POST /v1/rerank`."""

    query: str
    documents: list[str | TextDocument]
    top_n: Annotated[Integer, Field(ge=1, le=MAX_INT32)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


class ScoreBody(CommonBody):
    """`POST /v1/score`. Of two lists, the pairs are the first of both, the second of both, and so on; a single text
    belongs to all of the other list."""

    text_1: str | list[str]
    text_2: str | list[str]
    instruction: str | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> ScoreBody:
        first, second = self.text_1, self.text_2
        if isinstance(first, list) and (isinstance(second, str) or len(first) != len(second)):
            raise ValueError("text_1: must be one text, or as many as text_2")
        return self

    @property
    def pairs(self) -> list[tuple[str, str]]:
        seconds = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        firsts = [self.text_1] * len(seconds) if isinstance(self.text_1, str) else self.text_1
        return list(zip(firsts, seconds, strict=True))
