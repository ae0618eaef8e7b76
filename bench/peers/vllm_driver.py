"""A driver of vLLM, step by step: greedy, prefix caching at its default; compiled, also with drafts by n-grams, or
eager. Runs in vLLM's own environment."""

from __future__ import annotations

import sys
import time

from vllm import LLM, SamplingParams, TokensPrompt
from vllm import __version__ as vllm_version
from vllm.sampling_params import RequestOutputKind

from inflight.bench.peers.driver import Request, Setup, TokenBatch, context_tokens, serve

# As many drafted tokens as ours by default, looked up by n-grams of the same lengths.
NGRAM_DRAFTS = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 5, "prompt_lookup_min": 2}


class VllmEngine:
    """`LLM.llm_engine`. Text is not made of the tokens: what is compared is the engine."""

    def __init__(self, setup: Setup) -> None:
        eager = setup.variant == "eager"
        self._llm = LLM(
            model=setup.model,
            dtype=setup.dtype,
            max_num_seqs=setup.seats,
            max_model_len=context_tokens(setup),
            enforce_eager=eager,
            disable_log_stats=True,
            speculative_config=NGRAM_DRAFTS if setup.variant == "ngram" else None,
        )
        self._engine = self._llm.llm_engine
        self._num_steps = self._num_runs = 0
        self._words = {"engine": f"vLLM {vllm_version}", "mode": setup.variant, "dtype": setup.dtype}

    def describe(self) -> dict[str, str]:
        return self._words

    def add(self, request: Request) -> None:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=request.output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        # No run finds the KV of an earlier one, also where their prompts are the same.
        prompt = TokensPrompt(prompt_token_ids=request.prompt_ids, cache_salt=str(self._num_runs))
        self._engine.add_request(str(request.id), prompt, sampling)

    def advance(self, wait_s: float | None) -> list[TokenBatch]:
        """Computes one step."""
        outputs = self._engine.step()
        self._num_steps += 1
        tokens = [(int(output.request_id), len(output.outputs[0].token_ids)) for output in outputs]
        tokens = [(request_id, number) for request_id, number in tokens if number]
        return [TokenBatch(time.monotonic(), tokens)] if tokens else []

    def figures(self) -> dict[str, float]:
        num_steps, self._num_steps = self._num_steps, 0
        self._num_runs += 1
        return {"num_steps": num_steps}


if __name__ == "__main__":
    sys.exit(serve(VllmEngine))
