"""The block pool: allocation, sharing, eviction, conservation."""

from __future__ import annotations

import pytest

from inflight.executor.scheduler.blocks import BlockError, BlockPool


def _counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_cached, pool.num_used


def _cache(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    """Leaves published blocks without references."""
    blocks = pool.allocate(len(hashes))
    assert blocks is not None
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.publish(block, block_hash)
    pool.release(blocks)
    return blocks


def test_block_ids_leave_the_spare_block_out() -> None:
    assert sorted(BlockPool(4, 16).allocate(4) or []) == [1, 2, 3, 4]


def test_allocation_of_more_than_is_available_takes_nothing() -> None:
    pool = BlockPool(4, 16)
    held = pool.allocate(3)

    assert held is not None
    assert pool.allocate(2) is None
    assert _counts(pool) == (1, 0, 3)
    pool.check([held])


def test_released_blocks_are_free_again() -> None:
    pool = BlockPool(4, 16)
    pool.release(pool.allocate(4) or [])

    assert _counts(pool) == (4, 0, 0)
    pool.check([])


def test_published_block_outlives_its_sequence_and_is_found_by_its_hash() -> None:
    pool = BlockPool(4, 16)
    blocks = _cache(pool, [b"a", b"b"])

    assert _counts(pool) == (2, 2, 0)
    assert pool.share([b"a", b"b", b"c"]) == blocks
    assert _counts(pool) == (2, 0, 2)


def test_share_stops_at_the_first_gap() -> None:
    pool = BlockPool(4, 16)
    blocks = _cache(pool, [b"a", b"c"])

    assert pool.share([b"a", b"b", b"c"]) == blocks[:1]


def test_shared_block_stays_used_until_its_last_reference_is_released() -> None:
    pool = BlockPool(4, 16)
    _cache(pool, [b"a"])
    first, second = pool.share([b"a"]), pool.share([b"a"])
    pool.check([first, second])

    pool.release(first)
    assert _counts(pool) == (3, 0, 1)
    pool.release(second)
    assert _counts(pool) == (3, 1, 0)


def test_free_blocks_are_taken_before_cached_ones_are_evicted() -> None:
    pool = BlockPool(4, 16)
    _cache(pool, [b"a", b"b"])
    pool.allocate(2)

    assert len(pool.share([b"a", b"b"])) == 2


def test_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    pool = BlockPool(3, 16)
    _cache(pool, [b"a", b"b", b"c"])
    pool.allocate(1)

    assert len(pool.share([b"a", b"b", b"c"])) == 2


def test_least_recently_released_prefix_is_evicted_first() -> None:
    # Given two cached prefixes, the older of them used once more.
    pool = BlockPool(2, 16)
    _cache(pool, [b"a"])
    _cache(pool, [b"b"])
    pool.release(pool.share([b"a"]))

    # When one block is needed.
    pool.allocate(1)

    # Then the one that was not used stays no longer.
    assert not pool.share([b"b"])
    assert pool.share([b"a"])


def test_evicted_block_is_not_found_any_more() -> None:
    pool = BlockPool(1, 16)
    _cache(pool, [b"a"])
    held = pool.allocate(1)

    assert held == [1]
    assert not pool.is_published(1)
    assert pool.share([b"a"]) == []
    pool.check([held])


def test_second_block_with_an_equal_hash_stays_private() -> None:
    pool = BlockPool(2, 16)
    held = pool.allocate(2)
    assert held is not None
    for block in held:
        pool.publish(block, b"a")

    assert [pool.is_published(block) for block in held] == [True, False]
    pool.release(held)
    assert _counts(pool) == (1, 1, 0)
    pool.check([])


def test_double_release_is_caught() -> None:
    pool = BlockPool(2, 16)
    held = pool.allocate(1) or []
    pool.release(held)

    with pytest.raises(BlockError, match="block 1 is released and no sequence holds it"):
        pool.release(held)
    assert pool.num_free == 2


def test_publishing_a_block_that_no_sequence_holds_or_twice_is_refused() -> None:
    pool = BlockPool(2, 16)
    held = pool.allocate(1) or []
    with pytest.raises(BlockError, match="block 2 is published and no sequence holds it"):
        pool.publish(2, b"hash")
    pool.publish(held[0], b"hash")
    with pytest.raises(BlockError, match="block 1 is published twice"):
        pool.publish(held[0], b"other")
    pool.check([held])


def test_retracted_blocks_are_not_found_unless_another_holds_them() -> None:
    pool = BlockPool(3, 16)
    held = pool.allocate(2) or []
    for block in held:
        pool.publish(block, bytes([block]))
    shared = pool.share([bytes([held[0]])])

    pool.retract(held)

    assert [pool.is_findable(bytes([block])) for block in held] == [True, False]
    pool.check([held, shared])
    pool.release(shared)
    pool.retract(held)
    pool.release(held)
    assert pool.num_free == 3


def test_check_reports_a_leaked_block() -> None:
    pool = BlockPool(2, 16)
    pool.allocate(1)

    with pytest.raises(AssertionError, match=r"tables against references: \[\(1, 0, 1\)\]"):
        pool.check([])


def test_check_reports_a_block_in_a_table_that_has_no_reference() -> None:
    pool = BlockPool(2, 16)

    with pytest.raises(AssertionError, match=r"tables against references: \[\(2, 1, 0\)\]"):
        pool.check([[2]])


def test_check_reports_two_owners_of_a_private_block() -> None:
    pool = BlockPool(2, 16)
    held = pool.allocate(1)
    assert held is not None

    with pytest.raises(AssertionError, match=r"tables against references: \[\(1, 2, 1\)\]"):
        pool.check([held, held])


def test_check_reports_a_block_twice_in_one_table() -> None:
    pool = BlockPool(2, 16)
    _cache(pool, [b"a"])
    table = pool.share([b"a"]) + pool.share([b"a"])

    with pytest.raises(AssertionError, match="twice in one table"):
        pool.check([table])


def test_check_reports_the_spare_block_in_a_table() -> None:
    with pytest.raises(AssertionError, match=r"\(0, 1, 0\)"):
        BlockPool(2, 16).check([[0]])


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_pool_without_room_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        BlockPool(num_blocks, block_size)
