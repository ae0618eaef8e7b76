"""Which prefixes are found on models with recurrent layers: the traffic of agents against an ideal cache, and what is
known to have gone wrong in other engines."""

from __future__ import annotations

import pytest

from inflight.router.request.ids import prefix_word, state_prefixes
from tests.support.scheduler.agent_trace import END, GRID, AgentTrace, Call, HybridCache, ideal_hits

SYSTEM = (*range(100, 299), END)
USER = (*range(1000, 1099), END)


def hits(cache: HybridCache, *prompts: tuple[int, ...]) -> list[int]:
    """What is found of prompts that are answered with a word."""
    return cache.hits([Call(prompt, (7,)) for prompt in prompts])


def on_grid(num_tokens: int) -> int:
    return num_tokens // GRID * GRID


def words(begin: int, count: int) -> tuple[int, ...]:
    return tuple(range(begin, begin + count))


# A quarter of the memory for states that are as large as twelve blocks, as those of Qwen3.5-35B are of 3,000 tokens.
@pytest.mark.parametrize("num_blocks", [2057, 3000])
def test_agents_find_as_much_as_with_a_cache_that_knows_the_future(num_blocks: int) -> None:
    calls = list(AgentTrace(seed=4, num_sessions=9).calls())
    num_checkpoints = num_blocks // 3 // 12
    found = HybridCache(num_blocks, num_checkpoints).hits(calls)
    ideal = ideal_hits(calls, num_blocks, num_checkpoints)
    num_tokens = sum(len(call.prompt) for call in calls)
    assert len(calls) > 150
    assert sum(ideal) > 0.85 * num_tokens
    assert sum(found) >= 0.95 * sum(ideal)


def test_a_prompt_that_branches_off_leaves_the_other_its_state() -> None:
    cache = HybridCache(400, 20)
    conversation = (*SYSTEM, *words(5000, 900), END)
    other = (*conversation[:600], *words(9000, 50))
    assert hits(cache, conversation, other)[1] == on_grid(len(SYSTEM))
    assert hits(cache, (*conversation, *USER)) == [on_grid(len(conversation))]


def test_unique_questions_find_what_they_share_from_the_second_on() -> None:
    cache = HybridCache(400, 20)
    questions = [(*SYSTEM, *words(2000 * number, 300), END) for number in range(1, 5)]
    assert hits(cache, *questions) == [0, *[on_grid(len(SYSTEM))] * 3]


def test_without_messages_the_third_prompt_finds_what_they_share() -> None:
    cache = HybridCache(400, 20)
    shared = words(100, 500)
    assert hits(cache, *((*shared, *words(2000 * number, 300)) for number in range(1, 5))) == [0, 0, 448, 448]


def test_prompts_without_the_thinking_of_earlier_turns_find_the_message_before_it() -> None:
    cache = HybridCache(400, 20)
    first = (*SYSTEM, *USER, 8)
    thought, answer = words(3000, 200), (*words(4000, 20), END)
    cache.run(Call(first, thought + answer))
    # The state at the end of the output is behind the thinking, which the next prompt does not have.
    assert hits(cache, (*SYSTEM, *USER, 8, *answer, *USER)) == [on_grid(len(SYSTEM + USER))]


def test_a_long_conversation_leaves_others_their_states() -> None:
    cache = HybridCache(1000, 8)
    others = [words(20_000 * number, 650) for number in (1, 2)]
    hits(cache, *others)
    prompt = SYSTEM
    for turn in range(12):
        prompt = (*prompt, *words(5000 + 200 * turn, 150), END)
        call = Call(prompt, (*words(9000 + 100 * turn, 70), END))
        cache.run(call)
        prompt += call.output
    assert hits(cache, *others) == [640, 640]


def test_a_state_that_only_lies_on_the_way_does_not_count_as_used() -> None:
    cache = HybridCache(1000, 4)
    short, long = words(100, 200), words(100, 400)
    hits(cache, short, long)  # states at 192, which the second has used, and at 384
    for number in range(1, 4):
        hits(cache, long)
        hits(cache, words(2000 * number, 100))
    # Both were there before; each use of the longer one kept only that.
    assert hits(cache, long, short) == [384, 0]


def test_what_is_behind_the_last_state_is_computed_again_and_not_given_up() -> None:
    cache = HybridCache(1000, 20)
    conversation = (*SYSTEM, *words(5000, 2000))
    # All but 100 tokens are the same, and the last state before them is that of the system's message.
    assert hits(cache, conversation, (*conversation[:-100], 9))[1] == on_grid(len(SYSTEM))


def test_a_short_shared_prefix_is_found() -> None:
    cache = HybridCache(400, 20)
    assert hits(cache, *((*words(100, 69), END, *words(2000 * n, 40), END) for n in (1, 2, 3))) == [0, 64, 64]


def test_a_collapse_of_reuse_can_be_seen() -> None:
    conversations = [words(5000 * number, 650) for number in range(1, 9)]
    enough, too_few = HybridCache(1000, 40), HybridCache(1000, 2)
    for cache in (enough, too_few):
        hits(cache, *conversations, *conversations)
    for cache, num_usable in ((enough, 8 * 640), (too_few, 0)):
        counts = cache.scheduler.kv_counts().states
        assert counts is not None
        assert (counts.kv_tokens, counts.usable_tokens) == (8 * 640, num_usable)
    counts = too_few.scheduler.kv_counts().states
    assert counts is not None
    assert counts.dropped == 14


def test_names_in_reports_are_those_of_routers() -> None:
    cache = HybridCache(400, 20)
    prompt = (*SYSTEM, *USER, *words(5000, 300), END, 8)
    hits(cache, prompt)
    counts = cache.scheduler.kv_counts().states
    assert counts is not None
    named = state_prefixes(prompt, {END}, GRID, b"")
    assert {name.partition(":")[0] for name in named} == {prefix_word(name) for name in counts.names}
    assert len(named) == 3


def test_a_state_whose_block_is_evicted_makes_room() -> None:
    cache = HybridCache(50, 20)
    for number in range(1, 6):
        hits(cache, words(5000 * number, 650))
    counts = cache.scheduler.kv_counts().states
    assert counts is not None
    assert (counts.kept_checkpoints, counts.dropped) == (1, 4)
