"""Greedy output of vLLM with penalties, for bench/comparison/penalties.py. Runs in vLLM's own environment.

Reads one JSON object from stdin: `model`, a Hugging Face folder, and `cases`, each with `prompt_ids`, `max_tokens` and
the penalties. Writes a list to the file that is its argument: for each case its token ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams, TokensPrompt

PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")


def main(target: Path) -> None:
    asked = json.load(sys.stdin)
    llm = LLM(model=asked["model"], dtype="float32", max_num_seqs=8, max_model_len=512, enforce_eager=True)
    prompts = [TokensPrompt(prompt_token_ids=case["prompt_ids"]) for case in asked["cases"]]
    samplings = [
        SamplingParams(
            temperature=0.0,
            max_tokens=case["max_tokens"],
            ignore_eos=True,
            detokenize=False,
            **{name: case[name] for name in PENALTIES},
        )
        for case in asked["cases"]
    ]
    outputs = llm.generate(prompts, samplings)
    target.write_text(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
