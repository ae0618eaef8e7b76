"""The names of a prompt's beginnings."""

from __future__ import annotations

import random

from inflight.common.protocol import PrefixName, state_positions
from inflight.router.dispatch.kept_states import KeptStates
from inflight.router.request.ids import MAX_PREFIXES, named_block_counts, prefix_hashes, state_prefixes


def test_blocks_that_are_named_double_up_to_the_last() -> None:
    assert named_block_counts(0) == ()
    assert named_block_counts(1) == (1,)
    assert named_block_counts(4) == (1, 2, 4)
    assert named_block_counts(13) == (1, 2, 4, 8, 13)


def test_very_long_prompt_keeps_the_names_of_its_longest_beginnings() -> None:
    counts = named_block_counts(9000)
    assert len(counts) == MAX_PREFIXES
    assert counts[-2:] == (8192, 9000)


def test_prompts_share_the_names_of_what_they_share() -> None:
    shared = list(range(32))
    one, other = prefix_hashes([*shared, 1, 2, 3, 4], 4, b"s"), prefix_hashes([*shared, 4, 3, 2, 1], 4, b"s")
    assert len(one) == 5  # 1, 2, 4, 8 and 9 blocks
    assert one[:4] == other[:4]
    assert one[4] != other[4]


def test_longer_turn_of_a_conversation_finds_the_shorter_one() -> None:
    rng = random.Random(1)
    turn = [rng.randrange(1000) for _ in range(64)]
    assert set(prefix_hashes(turn, 16, b"")) < set(prefix_hashes([*turn, *range(500)], 16, b""))


def test_other_salts_never_match() -> None:
    ids = list(range(64))
    assert not set(prefix_hashes(ids, 16, b"acme\0")) & set(prefix_hashes(ids, 16, b"other\0"))
    assert not set(prefix_hashes(ids, 16, b"acme\0x")) & set(prefix_hashes(ids, 16, b"acme\0"))


def test_incomplete_block_has_no_name() -> None:
    assert prefix_hashes([1, 2, 3], 4, b"") == ()
    assert prefix_hashes([1, 2, 3, 4], 4, b"") == prefix_hashes([1, 2, 3, 4, 5], 4, b"")


def test_names_are_short_text_and_the_same_in_every_process() -> None:
    assert prefix_hashes(list(range(16)), 16, b"default\0") == ("73LZLDDjneA",)


END = 1


def turns(*lengths: int) -> list[int]:
    """A prompt of messages, each of so many tokens and its end."""
    return [token for number, length in enumerate(lengths, 2) for token in [*[number] * length, END]]


def positions(names: tuple[str, ...]) -> list[int]:
    return [int(name.partition(":")[2]) for name in names]


def test_states_are_kept_before_the_ends_of_the_first_and_last_messages_and_of_the_prompt() -> None:
    prompt = [*turns(99, 99, 99, 99, 99, 99, 99), *[9] * 20]
    assert state_positions(prompt, {END}, 16) == (96, 192, 496, 592, 688, 704)
    assert state_positions([5] * 50, {END}, 16) == (48,)
    assert state_positions([5] * 16, {END}, 16) == ()  # its last token is computed again


def test_turns_of_a_conversation_name_the_ends_of_messages_alike() -> None:
    before = state_prefixes(turns(99, 50), {END}, 16, b"s")
    after = state_prefixes(turns(99, 50, 70, 40), {END}, 16, b"s")
    assert positions(before) == [96, 144]
    assert after[:2] == before
    assert positions(after[2:]) == [208, 256]
    # What a branch shares has the same names, and no more.
    other = [*turns(99, 50), *[7] * 70, END]
    assert [name for name in state_prefixes(other, {END}, 16, b"s") if name in after] == list(before)


def test_prefix_that_an_executor_keeps_is_named_wherever_it_ends() -> None:
    prompt = list(range(10, 210))
    name = PrefixName(b"s").of(prompt, 80)
    assert positions(state_prefixes(prompt, {END}, 16, b"s", {name})) == [80, 192]
    assert positions(state_prefixes(prompt, {END}, 16, b"t", {name})) == [192]


def test_long_conversation_keeps_the_names_of_its_first_and_last_messages() -> None:
    prompt = turns(*[31] * 40)
    kept = {PrefixName(b"").of(prompt, end) for end in range(32, 32 * 40, 32)}
    assert positions(state_prefixes(prompt, {END}, 32, b"", kept)) == [32, 64, *range(32 * 31, 32 * 41, 32)]


def test_kept_states_are_those_of_all_executors() -> None:
    kept = KeptStates()
    kept.set("x", [b"1", b"2"])
    kept.set("y", [b"2", b"3"])
    kept.set("x", [b"1"])
    assert [name in kept for name in (b"1", b"2", b"3")] == [True, True, True]
    kept.forget("y")
    assert [name in kept for name in (b"1", b"2", b"3")] == [True, False, False]
