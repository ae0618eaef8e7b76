"""The names of a prompt's beginnings."""

from __future__ import annotations

import random

from inflight.router.request.ids import MAX_PREFIXES, named_block_counts, prefix_hashes


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
