"""Greedy outputs of `vllm.LLM`, by vLLM's own Python: `python -m tests.vllm.reference MODEL NUM_TOKENS < prompts`.

Prompts are a list of lists of token ids in JSON, and so are the outputs, on a line of stdout.
"""

from __future__ import annotations

import json
import sys

from vllm import LLM, SamplingParams, TokensPrompt


def main(model: str, num_tokens: int) -> None:
    """Generates alone: one sequence at a time."""
    llm = LLM(model=model, dtype="float32", max_model_len=512, enforce_eager=True, max_num_seqs=1, block_size=32)
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in json.load(sys.stdin)]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
