"""What every `Backend` does: the real one is checked by `python -m tests.vllm.contract` in vLLM's own environment, the
fake one by `test_contract.py`. Needs no pytest.

Each function gets a backend without work, and leaves it so.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from inflight.executor.vllm.backend import Backend, Produced, RefusedError, StepStats
from inflight.executor.vllm.parameters import REPLAYED_OUTPUT

PROMPT = [11, 45, 7, 100, 23, 52, 81, 3, 64]
GREEDY: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "ignore_eos": True,
    "stop_token_ids": [],
    "detokenize": False,
}
SMOLLM2_EOS = 2
_numbers = iter(range(1_000_000))


async def generated(
    backend: Backend, prompt_ids: list[int], num_tokens: int, salt: str | None = None, **parameters: Any
) -> list[Produced]:
    """All that a request gets."""
    keywords = {**GREEDY, "max_tokens": num_tokens, **parameters}
    outputs: list[Produced] = []
    await backend.generate(f"contract-{next(_numbers)}", prompt_ids, keywords, salt, outputs.append)
    return outputs


def tokens_of(outputs: list[Produced]) -> list[int]:
    return [token_id for produced in outputs for token_id in produced.token_ids]


async def ends_at_max_tokens(backend: Backend) -> None:
    outputs = await generated(backend, PROMPT, 7)
    assert len(tokens_of(outputs)) == 7
    assert [one.finish_reason for one in outputs if one.finish_reason] == ["length"]
    assert outputs[-1].finish_reason == "length"


async def greedy_output_continues_from_any_place(backend: Backend) -> None:
    whole = tokens_of(await generated(backend, PROMPT, 8))
    assert tokens_of(await generated(backend, [*PROMPT, *whole[:5]], 3)) == whole[5:]


async def stop_token_is_the_last(backend: Backend) -> None:
    whole = tokens_of(await generated(backend, PROMPT, 6))
    outputs = await generated(backend, PROMPT, 6, stop_token_ids=[whole[3]])
    assert tokens_of(outputs) == whole[: whole.index(whole[3]) + 1]
    assert outputs[-1].finish_reason == "stop"


async def log_probabilities_belong_to_the_tokens(backend: Backend) -> None:
    outputs = await generated(backend, PROMPT, 3, logprobs=2, prompt_logprobs=1)
    rows = [(token_id, one) for out in outputs for token_id, one in zip(out.token_ids, out.logprobs, strict=True)]
    assert len(rows) == 3
    for token_id, row in rows:
        assert row.rank == 1
        assert row.top_ids[0] == token_id
        assert len(row.top_ids) == len(row.top_logprobs) == 2
        assert row.top_logprobs[0] == row.logprob <= 0
        assert row.top_logprobs[0] >= row.top_logprobs[1]
    assert sum(len(one.prompt_logprobs) for one in outputs) == len(PROMPT) - 1
    assert all(len(row.top_ids) == 1 and row.rank >= 1 for row in outputs[0].prompt_logprobs)


async def excluded_tokens_are_not_chosen(backend: Backend) -> None:
    first, second = tokens_of(await generated(backend, PROMPT, 2))
    for excluding in ({"logit_bias": {first: -100.0}}, {"_bad_words_token_ids": [[first]]}):
        assert tokens_of(await generated(backend, PROMPT, 1, **excluding)) != [first]
    two = tokens_of(await generated(backend, PROMPT, 2, _bad_words_token_ids=[[first, second]]))
    assert two[0] == first
    assert two[1] != second


async def given_output_is_generated_again(backend: Backend) -> None:
    given = [9, 8, 7, 6]
    replayed: dict[str, Any] = {"extra_args": {REPLAYED_OUTPUT: given}}
    outputs = await generated(backend, PROMPT, 7, **replayed)
    assert tokens_of(outputs)[:4] == given
    assert tokens_of(outputs)[4:] == tokens_of(await generated(backend, [*PROMPT, *given], 3))
    # What is excluded counts it as output.
    after = tokens_of(outputs)[4]
    words: dict[str, Any] = {"_bad_words_token_ids": [[given[-1], after]]}
    assert tokens_of(await generated(backend, PROMPT, 5, **replayed, **words))[4] != after


async def grammar_and_random_numbers_continue_behind_given_output(backend: Backend) -> None:
    """SmolLM2 on vLLM only."""
    form = {"grammar": "%llguidance {}\nstart: /[a-z]{3} [0-9]{12}/"}
    asked: dict[str, Any] = {
        "structured_outputs": form, "stop_token_ids": [SMOLLM2_EOS], "temperature": 1.5, "seed": 11,
        "frequency_penalty": 1.0,
    }  # fmt: skip
    whole = tokens_of(await generated(backend, PROMPT, 30, **asked))
    for place in (1, len(whole) // 2, len(whole) - 1):
        again = tokens_of(await generated(backend, PROMPT, 30, **asked, extra_args={REPLAYED_OUTPUT: whole[:place]}))
        assert again == whole


async def grammar_limits_the_output(backend: Backend) -> None:
    """SmolLM2 on vLLM only."""
    form = {"grammar": '%llguidance {}\nstart: "yes" | "no"'}
    outputs = await generated(backend, PROMPT, 8, structured_outputs=form, stop_token_ids=[SMOLLM2_EOS])
    assert outputs[-1].finish_reason == "stop"
    assert tokens_of(outputs)[-1] == SMOLLM2_EOS
    assert 1 < len(tokens_of(outputs)) < 5


async def refusal_names_the_parameter(backend: Backend) -> None:
    text = ""
    try:
        await generated(backend, PROMPT, 3, temperature=3.0)
    except RefusedError as refused:
        text = str(refused)
    assert "temperature" in text


async def prefix_is_found_again_with_its_salt(backend: Backend) -> None:
    block_size = backend.facts.block_size
    prompt = [1 + one % 200 for one in range(2 * block_size + 3)]
    numbers = [
        (await generated(backend, prompt, 1, salt, **more))[-1].num_cached_tokens
        for salt, more in (("a", {}), ("a", {}), ("b", {}), ("a", {"skip_reading_prefix_cache": True}))
    ]
    assert numbers == [0, 2 * block_size, 0, 0]


async def blocks_of_a_prompt_are_in_the_cache_after_it(backend: Backend) -> None:
    sizes: list[int] = []
    backend.watch_cache(sizes.append)
    prompt = [3 + one % 190 for one in range(3 * backend.facts.block_size + 1)]
    async with asyncio.timeout(60):
        # What is told before it is listened to is not heard.
        while not sizes:
            await generated(backend, prompt, 1, f"warm {next(_numbers)}")
            await asyncio.sleep(0.05)
        size = sizes[-1]
        for _ in range(2):
            await generated(backend, prompt, 1, "counted")
        while sizes[-1] < size + 3:
            await asyncio.sleep(0.01)
    assert sizes[-1] == size + 3


async def every_step_is_reported(backend: Backend) -> None:
    steps: list[StepStats] = []
    backend.watch_steps(steps.append)
    await asyncio.gather(*(generated(backend, [*PROMPT, one], 4) for one in range(3)))
    assert len(steps) >= 4
    assert max(one.num_running for one in steps) <= backend.facts.max_num_sequences
    assert all(0 <= one.kv_usage <= 1 for one in steps)
    assert max(one.kv_usage for one in steps) > 0
    assert sum(one.num_prompt_tokens for one in steps) > 0


async def cancelled_request_leaves_nothing(backend: Backend) -> None:
    steps: list[StepStats] = []
    backend.watch_steps(steps.append)
    begun = asyncio.Event()
    keywords = {**GREEDY, "max_tokens": 40}
    reading = backend.generate(f"contract-{next(_numbers)}", PROMPT, keywords, None, lambda _: begun.set())
    reader = asyncio.create_task(reading)
    await begun.wait()
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert reader.cancelled()
    steps.clear()
    await generated(backend, PROMPT, 3)
    assert steps[-1].num_running == steps[-1].num_waiting == 0
    assert steps[-1].kv_usage == 0


CONTRACT: tuple[Callable[[Backend], Awaitable[None]], ...] = (
    ends_at_max_tokens,
    greedy_output_continues_from_any_place,
    stop_token_is_the_last,
    log_probabilities_belong_to_the_tokens,
    excluded_tokens_are_not_chosen,
    given_output_is_generated_again,
    refusal_names_the_parameter,
    prefix_is_found_again_with_its_salt,
    blocks_of_a_prompt_are_in_the_cache_after_it,
    every_step_is_reported,
    cancelled_request_leaves_nothing,
)


OF_SMOLLM2 = (grammar_limits_the_output, grammar_and_random_numbers_continue_behind_given_output)


async def check_vllm(arguments: list[str]) -> None:
    """Checks the real backend, started with these flags of vLLM."""
    from inflight.executor.vllm.internals import start_vllm

    backend = await start_vllm(arguments)
    try:
        for rule in (*CONTRACT, *OF_SMOLLM2):
            await rule(backend)
            print(f"ok {rule.__name__}", flush=True)
    finally:
        backend.close()


if __name__ == "__main__":
    asyncio.run(check_vllm(sys.argv[1:]))
