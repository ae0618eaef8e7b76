"""Chain hashes, and the blocks that sequences share by them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.executor.scheduler.prefix_cache import HASH_BYTES, chain_hashes
from inflight.executor.scheduler.sequence import FinishReason
from tests.support.scheduler.scheduling import (
    LIMITS,
    make_scheduler,
    make_sequence,
    retire,
    rows_of,
    step,
)


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(chain_hashes([7] * length, 4, b"")) for length in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_equal_prefixes_have_equal_hashes_up_to_where_they_part() -> None:
    first = chain_hashes([1, 2, 3, 4, 5, 6], 2, b"salt")
    second = chain_hashes([1, 2, 3, 4, 9, 6], 2, b"salt")

    assert first[:2] == second[:2]
    assert first[2] != second[2]


def test_block_with_equal_tokens_after_another_prefix_differs() -> None:
    assert chain_hashes([1, 1, 5, 5], 2, b"")[1] != chain_hashes([2, 2, 5, 5], 2, b"")[1]
    assert len(set(chain_hashes([5] * 8, 2, b""))) == 4


def test_other_salt_gives_other_hashes() -> None:
    assert chain_hashes([1, 2], 2, b"a") != chain_hashes([1, 2], 2, b"b")
    assert chain_hashes([1, 2], 2, b"") != chain_hashes([1, 2], 2, b"\0")


def test_salt_of_any_length_and_the_largest_token_id_hash() -> None:
    hashes = chain_hashes([0, 2**32 - 1], 2, b"x" * 1000)

    assert [len(block_hash) for block_hash in hashes] == [HASH_BYTES]


def test_token_borders_matter() -> None:
    assert chain_hashes([1, 256], 2, b"") != chain_hashes([257, 0], 2, b"")


class TestPrefixCache:
    def test_equal_prompt_reuses_whole_blocks_and_computes_at_least_one_token(self) -> None:
        scheduler = make_scheduler()
        for request_id in "ab":
            scheduler.offer(make_sequence(request_id, range(8), max_tokens=1))
            plan = scheduler.schedule()
            retire(scheduler, plan)

        assert rows_of(plan) == [("b", 4, 4, True)]
        assert plan.boarded[0].num_cached_tokens == 4

    def test_output_is_reused_by_the_next_turn(self) -> None:
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", range(6), max_tokens=7))
        for token_id in range(10, 17):
            step(scheduler, token_id)
        follow_up = make_sequence("b", [*range(6), *range(10, 17), 50])
        scheduler.offer(follow_up)
        scheduler.schedule()

        # The KV of the last sampled token was never computed: 12 of the 13 known tokens fill three blocks.
        assert follow_up.num_cached_tokens == 12

    @pytest.mark.parametrize("salts", [(b"x", b"y"), (None, None), (b"", None)])
    def test_other_salt_or_none_shares_nothing(self, salts: tuple[bytes | None, bytes | None]) -> None:
        scheduler = make_scheduler()
        for request_id, salt in zip("ab", salts, strict=True):
            scheduler.offer(make_sequence(request_id, range(8), max_tokens=1, salt=salt))
            plan = scheduler.schedule()
            retire(scheduler, plan)

        assert plan.boarded[0].num_cached_tokens == 0

    def test_switched_off_it_shares_and_keeps_nothing(self) -> None:
        scheduler = make_scheduler(replace(LIMITS, enable_prefix_cache=False))
        for request_id in "ab":
            scheduler.offer(make_sequence(request_id, range(8), max_tokens=1))
            plan = scheduler.schedule()
            retire(scheduler, plan)

        assert plan.boarded[0].num_cached_tokens == 0
        assert scheduler.pool.num_cached == 0

    def test_block_is_not_shared_before_the_step_that_writes_it_is_retired(self) -> None:
        scheduler = make_scheduler(replace(LIMITS, max_num_tokens=16))
        scheduler.offer(make_sequence("a", range(8)))
        scheduler.offer(make_sequence("b", range(8)))

        assert rows_of(scheduler.schedule()) == [("a", 0, 8, True), ("b", 0, 8, True)]

    def test_running_sequences_share_blocks_and_the_pool_counts_them_once(self) -> None:
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", range(8)))
        step(scheduler)
        scheduler.offer(make_sequence("b", range(8)))
        scheduler.schedule()

        first, second = scheduler.held()
        assert first.block_table[0] == second.block_table[0]
        assert scheduler.pool.num_used == len(first.block_table) + len(second.block_table) - 1
        scheduler.check()

    def test_cancelled_prefill_leaves_what_it_computed_to_the_next_attempt(self) -> None:
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", range(16)))
        step(scheduler)
        scheduler.cancel("a", 1, FinishReason.CANCELLED)
        again = make_sequence("a", range(16), attempt=2)
        scheduler.offer(again)
        scheduler.schedule()

        assert again.num_cached_tokens == 8
