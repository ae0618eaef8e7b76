"""Copy-and-edit requests as a workload: real prompts, and as many output tokens as SmolLM2 answers with. Workloads of
random ids have nothing to draft from.

    python -m inflight.bench.drafts.trace > bench/workloads/edits.jsonl
    inflight bench --workload bench/workloads/edits.jsonl --modes engine --variant "suffix=--speculation suffix" \
        --peer vllm --peer vllm:ngram --seats 32 --concurrency 1,4,32
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch

from inflight.bench.drafts.replay import BLOCKS_EACH, answer_all, edit_messages, sequences_of
from inflight.bench.engine.model_steps import BLOCK_SIZE
from inflight.common.machine import num_usable_cores
from inflight.common.model_source import load_tokenizer, resolve_model
from inflight.executor.model.loader import load_model


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32, help="at most 42; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=96, help="longest answer; default: %(default)s")
    options = parser.parse_args(argv)
    torch.set_num_threads(num_usable_cores())
    source = resolve_model("")
    model = load_model(source, dtype_name="bfloat16")
    tokenizer, eos_ids = load_tokenizer(source), model.description.eos_token_ids
    sequences = sequences_of(
        edit_messages()[: options.requests], tokenizer, eos_ids, temperature=0.0, max_tokens=options.tokens
    )
    model.allocate_kv(len(sequences) * BLOCKS_EACH, BLOCK_SIZE)
    answer_all(model, sequences)
    for sequence in sequences:
        prompt_ids = sequence.token_ids[: sequence.num_prompt_tokens]
        output_tokens = len(sequence.token_ids) - len(prompt_ids)
        print(json.dumps({"prompt_ids": prompt_ids, "output_tokens": output_tokens}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
