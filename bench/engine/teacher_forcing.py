"""A model's predictions after every token of given prompts, by the engine's forward pass and by transformers'.

Results are plain lists, so that the code that compares them needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from inflight.common.model_source import ModelSource
from inflight.executor.checkpoint.quantized_linear import make_dense
from inflight.executor.formats.loading import load_network
from inflight.executor.model.model import PagedModel
from inflight.executor.scheduler.sequence import PlanRow, Sampling, StepPlan, Stopping
from inflight.executor.scheduler.sequence import Sequence as TokenSequence
from inflight.executor.step.batch import pack

BLOCK_SIZE = 16
# The logits of a step are kept whole: 50 MB for these many tokens and a vocabulary of 50,000.
MAX_TOKENS_OF_STEP = 256


@dataclass(frozen=True, slots=True)
class Predictions:
    """One entry for each token of the prompts that another one follows, prompt after prompt.

    The likeliest next token, by how many logits it leads the second, and the log probability of the one that follows.
    """

    top_ids: list[int]
    top_gaps: list[float]
    log_probabilities: list[float]

    def first(self, count: int) -> Predictions:
        """Returns those of the first positions."""
        return Predictions(self.top_ids[:count], self.top_gaps[:count], self.log_probabilities[:count])


def transformers_predictions(source: ModelSource, prompts: Sequence[Sequence[int]]) -> Predictions:
    """By transformers' own forward in float32, with its plain attention and each prompt alone. Quantized weights are
    dequantized."""
    loaded, _ = load_network(source, torch.float32, torch.device("cpu"))
    make_dense(loaded, torch.float32)
    network: Any = loaded
    parts = []
    with torch.inference_mode():
        for prompt in prompts:
            logits = network(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
            parts.append(predictions(logits[:-1], prompt[1:]))
    return _joined(parts)


def paged_predictions(model: PagedModel, prompts: Sequence[Sequence[int]], chunk_tokens: int) -> Predictions:
    """By our own forward, `chunk_tokens` of a prompt in each step and several prompts together.

    One token a step is how answers are generated, more are how prompts are computed.
    """
    parts: list[list[Predictions]] = [[] for _ in prompts]
    for number, start, logits in _forced(model, prompts, chunk_tokens):
        parts[number].append(predictions(logits, prompts[number][start + 1 : start + 1 + len(logits)]))
    return _joined([part for of_prompt in parts for part in of_prompt])


def _forced(
    model: PagedModel, prompts: Sequence[Sequence[int]], chunk_tokens: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Yields the number of a prompt, a position in it, and the logits from there on, chunk after chunk. Nothing follows
    the last token of a prompt, so it has none."""
    prompts_at_once = max(1, MAX_TOKENS_OF_STEP // chunk_tokens)
    num_blocks = -(-max(map(len, prompts)) // BLOCK_SIZE)
    model.allocate_kv(num_blocks * min(prompts_at_once, len(prompts)), BLOCK_SIZE)
    for first in range(0, len(prompts), prompts_at_once):
        some = prompts[first : first + prompts_at_once]
        tables = (range(1 + i * num_blocks, 1 + (i + 1) * num_blocks) for i in range(len(some)))
        sequences = [_sequence(prompt, list(table)) for prompt, table in zip(some, tables, strict=True)]
        for i, start, logits in _steps(model, sequences, chunk_tokens):
            yield first + i, start, logits


def _sequence(token_ids: Sequence[int], block_table: list[int]) -> TokenSequence:
    """Returns a sequence whose prompt is all of these tokens."""
    greedy = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
    prompt, stopping = list(token_ids), Stopping(1, 0, frozenset())
    return TokenSequence("bench", 1, prompt, len(prompt), greedy, stopping, 0, None, block_table=block_table)


def _steps(
    model: PagedModel, sequences: Sequence[TokenSequence], chunk_tokens: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Computes the sequences together, a chunk of each in a step."""
    for start in range(0, max(sequence.num_tokens for sequence in sequences) - 1, chunk_tokens):
        going = [(i, some) for i, some in enumerate(sequences) if start < some.num_tokens - 1]
        rows = [PlanRow(some, start, min(chunk_tokens, some.num_tokens - 1 - start), samples=True) for _, some in going]
        batch = pack(StepPlan.of(rows), BLOCK_SIZE)
        logits = model.logits(replace(batch, logit_rows=torch.arange(batch.num_tokens)))
        of_rows = logits.split([row.num_tokens for row in rows])
        for (i, _), row_logits in zip(going, of_rows, strict=True):
            yield i, start, row_logits


def predictions(logits: Tensor, following_ids: Sequence[int]) -> Predictions:
    """Returns those of `logits[T, vocabulary]`, after which the T `following_ids` come."""
    top = logits.topk(2)
    following = logits.gather(1, torch.tensor(following_ids, device=logits.device)[:, None])[:, 0]
    return Predictions(
        top_ids=top.indices[:, 0].tolist(),
        top_gaps=(top.values[:, 0] - top.values[:, 1]).tolist(),
        log_probabilities=(following - logits.logsumexp(1)).tolist(),
    )


def _joined(parts: Sequence[Predictions]) -> Predictions:
    return Predictions(
        top_ids=[value for part in parts for value in part.top_ids],
        top_gaps=[value for part in parts for value in part.top_gaps],
        log_probabilities=[value for part in parts for value in part.log_probabilities],
    )
