"""Host-side decisions of a GPU step: buckets, the words of the layout, missing block table entries."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from inflight.executor.gpu.graphs import Bucket, bucket_of, decode_buckets, mixed_buckets
from inflight.executor.gpu.idle import idle_batch, idle_sampling, warm_up_lengths
from inflight.executor.gpu.step_layout import MAX_BANNED, StepLayout
from inflight.executor.gpu.table_entries import TableFollower
from inflight.executor.scheduler.sequence import PlanRow, Sampling, Sequence, StepPlan
from inflight.executor.step.batch import pack
from inflight.executor.step.sampling import SampleRow
from inflight.executor.step.sampling_columns import SamplingBatch
from tests.support.device.paged_cases import make_sequence

SPARE_ROW = 9


@pytest.mark.parametrize(
    ("most", "buckets"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (20, (1, 2, 4, 8, 16, 20)),
        (96, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96)),
        (300, (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), 256, 288, 300)),
    ],
)
def test_buckets_reach_from_one_to_every_seat(most: int, buckets: tuple[int, ...]) -> None:
    assert decode_buckets(most) == tuple(Bucket(size, size, True) for size in buckets)


def test_a_batch_takes_the_smallest_bucket_that_holds_it() -> None:
    buckets = decode_buckets(20)
    found = [bucket_of(buckets, rows, rows) for rows in (1, 3, 8, 9, 20, 21)]
    assert [bucket and bucket.num_sequences for bucket in found] == [1, 4, 8, 16, 20, None]


@pytest.mark.parametrize(
    ("max_num_tokens", "sizes"),
    [
        (0, ()),
        (1, (1,)),
        (100, (16, 32, 64, 100)),
        (512, (16, 32, *range(64, 513, 64))),
        (2000, (16, 32, *range(64, 513, 64), 640, 768, 896, 1024, 1280, 1536, 1792, 2000)),
    ],
)
def test_buckets_of_tokens_reach_to_the_limit(max_num_tokens: int, sizes: tuple[int, ...]) -> None:
    buckets = mixed_buckets(max_num_tokens, 100)
    assert tuple(dict.fromkeys(bucket.num_tokens for bucket in buckets)) == sizes
    assert list(buckets) == sorted(buckets)


@pytest.mark.parametrize("max_num_sequences", [1, 3, 16, 70, 256])
def test_every_step_within_the_limits_has_a_bucket_that_is_not_much_larger(max_num_sequences: int) -> None:
    buckets = mixed_buckets(512, max_num_sequences)
    for num_tokens in range(1, 513):
        for num_sequences in {1, 2, 17, 65, max_num_sequences}:
            if num_sequences <= min(num_tokens, max_num_sequences):
                bucket = bucket_of(buckets, num_tokens, num_sequences)
                assert bucket is not None
                assert num_tokens <= bucket.num_tokens < max(17, num_tokens + 64)
                assert num_sequences <= bucket.num_sequences <= min(bucket.num_tokens, max_num_sequences)
                assert bucket.num_sequences < max(17, 4 * num_sequences)
    assert bucket_of(buckets, 513, 1) is None


def sampling_of(num_rows: int, banned: dict[int, list[int]]) -> SamplingBatch:
    """Rows that differ in everything."""
    return SamplingBatch.of(
        SampleRow(
            Sampling(row / max(1, num_rows - 1), top_k=0, top_p=1.0, seed=2**64 - 1 - 3 * row),
            output_index=10 * row,
            banned_ids=frozenset(banned.get(row, [])),
        )
        for row in range(num_rows)
    )


def filled(layout: StepLayout, plan: StepPlan, sampling: SamplingBatch) -> dict[str, list[int]]:
    words = np.full(layout.num_words, 77, np.int32)
    layout.fill(words, pack(plan, 16), sampling, SPARE_ROW)
    return {name: words[field].tolist() for name, field in layout.fields.items()}


def test_padding_rows_have_a_context_of_one_token_in_the_spare_block() -> None:
    # Given three decodes in a bucket of five
    sequences = [make_sequence([10 * i + j for j in range(20)], [2 * i + 1, 2 * i + 2]) for i in range(3)]
    plan = StepPlan.of(PlanRow(sequence, 19, 1, True) for sequence in sequences)

    words = filled(StepLayout.of_decodes(5), plan, sampling_of(3, {}))

    assert words["token_ids"] == [19, 29, 39, 0, 0]
    assert words["positions"] == [19, 19, 19, 0, 0]
    assert words["slot_mapping"] == [2 * 16 + 3, 4 * 16 + 3, 6 * 16 + 3, 0, 0]
    assert words["query_starts"] == [0, 1, 2, 3, 4, 5]
    assert words["context_lengths"] == [20, 20, 20, 1, 1]
    assert words["table_rows"] == [0, 1, 2, SPARE_ROW, SPARE_ROW]
    assert words["is_carried"] == [0] * 5
    assert words["logit_rows"] == [0, 1, 2, 3, 4]
    assert np.array(words["temperatures"], np.int32).view(np.float32).tolist() == [0.0, 0.5, 1.0, 0.0, 0.0]


def test_padding_of_a_step_with_chunks_belongs_to_no_sequence() -> None:
    # Given a decode and a chunk in a layout for three more tokens and one more sequence
    sequences = [make_sequence([10 * i + j for j in range(20)], [2 * i + 1, 2 * i + 2]) for i in range(2)]
    plan = StepPlan.of([PlanRow(sequences[0], 19, 1, True), PlanRow(sequences[1], 17, 3, True)])

    words = filled(StepLayout(7, 3, 2, is_padded=True), plan, sampling_of(2, {}))

    assert words["token_ids"] == [19, 27, 28, 29, 0, 0, 0]
    assert words["slot_mapping"][4:] == words["positions"][4:] == [0, 0, 0]
    assert words["query_starts"] == [0, 1, 4, 4]
    assert words["context_lengths"] == [20, 20, 1]
    assert words["table_rows"] == [0, 1, SPARE_ROW]
    assert words["is_carried"] == [0] * 3
    assert words["logit_rows"] == [0, 3]


def test_what_is_captured_lies_at_the_same_place_whatever_the_step_yields() -> None:
    captured, layout = (
        StepLayout(7, 3, num_logits, num_scored, 2, is_padded=True) for num_logits, num_scored in ((0, 0), (5, 4))
    )
    names = list(captured.fields)
    for name in names[: names.index("logit_rows")]:
        assert layout.fields[name] == captured.fields[name]


def test_chunks_and_carried_tokens_keep_their_rows() -> None:
    # Given a decode whose token is not known yet, and a chunk that yields a token
    decode, chunk = make_sequence(list(range(6)), [1]), make_sequence(list(range(50, 90)), [2, 3, 4])
    plan = StepPlan.of([PlanRow(decode, 6, 1, True, carries=True), PlanRow(chunk, 37, 3, True)])

    words = filled(StepLayout(4, 2, 2), plan, sampling_of(2, {}))

    assert words["token_ids"] == [0, 87, 88, 89]
    assert words["query_starts"] == [0, 1, 4]
    assert words["context_lengths"] == [7, 40]
    assert words["logit_rows"] == [0, 3]
    assert (words["is_carried"], words["carried_from"][0]) == ([1, 0], 0)


def test_seeds_are_two_words_and_banned_ids_stay_with_their_row() -> None:
    sequences = [make_sequence([1, 2], [i + 1]) for i in range(3)]
    sampling = sampling_of(3, {0: [5, 6], 2: list(range(MAX_BANNED))})

    words = filled(StepLayout.of_decodes(3), StepPlan.of(PlanRow(s, 1, 1, True) for s in sequences), sampling)

    seeds = [(2**64 - 1 - 3 * row) for row in range(3)]
    assert [word & 0xFFFF_FFFF for word in words["seeds_low"]] == [seed & 0xFFFF_FFFF for seed in seeds]
    assert [word & 0xFFFF_FFFF for word in words["seeds_high"]] == [seed >> 32 for seed in seeds]
    assert words["output_indices"] == [0, 10, 20]
    assert words["banned_starts"] == [0, 2, 2, 2 + MAX_BANNED]
    assert words["banned_ids"][: 2 + MAX_BANNED] == [5, 6, *range(MAX_BANNED)]


def test_banned_ids_are_copied_as_far_as_there_are_any() -> None:
    layout, plan = StepLayout.of_decodes(4), StepPlan.of([PlanRow(make_sequence([1, 2], [1]), 1, 1, True)])
    words, first = np.full(layout.num_words, 77, np.int32), layout.fields["banned_ids"].start
    assert layout.fill(words, pack(plan, 16), sampling_of(1, {}), SPARE_ROW) == first
    assert layout.fill(words, pack(plan, 16), sampling_of(1, {0: [4, 8]}), SPARE_ROW) == first + 4
    assert words[layout.fields["banned_starts"]].tolist() == [0, 2, 2, 2, 2], "padding rows ban nothing"


def test_rows_that_report_log_probabilities_travel_with_the_step() -> None:
    sequences = [make_sequence([1, 2], [i + 1]) for i in range(3)]
    sampling = replace(sampling_of(3, {}), reporting=((0, 5), (2, 0)))
    words = filled(StepLayout.of_decodes(3), StepPlan.of(PlanRow(s, 1, 1, True) for s in sequences), sampling)
    assert words["reported_rows"][:2] == [0, 2]


def test_rows_travel_in_tiles_of_one_adapter() -> None:
    # Given decodes with the slots 2, none and 2, and a chunk of 17 tokens with slot 0
    sequences = [make_sequence(list(range(20)), [i + 1, i + 5]) for i in range(4)]
    for some, slot in zip(sequences, (2, None, 2, 0), strict=True):
        some.adapter_slot = slot
    lengths = (1, 1, 1, 17)
    plan = StepPlan.of(PlanRow(s, 20 - n, n, True) for s, n in zip(sequences, lengths, strict=True))

    words = filled(StepLayout(20, 4, 4, num_adapters=3), plan, sampling_of(4, {}))

    assert words["adapter_slots"] == [0, 0, 2, -1]
    assert words["adapter_rows"] == [*range(3, 20), *[-1] * 15, 0, 2, *[-1] * 30]


def test_tiles_of_adapters_do_not_depend_on_what_a_padded_step_contains() -> None:
    (some,) = sequences = [make_sequence(list(range(20)), [1, 5])]
    some.adapter_slot = 1
    plan = StepPlan.of(PlanRow(s, 3, 17, True) for s in sequences)

    words = filled(StepLayout(32, 4, 1, num_adapters=3, is_padded=True), plan, sampling_of(1, {}))

    assert words["adapter_slots"] == [1, 1, -1, -1, -1]
    assert words["adapter_rows"] == [*range(17), *[-1] * 63]


def test_padding_rows_and_steps_of_the_base_have_no_adapter() -> None:
    plan = StepPlan.of([PlanRow(make_sequence([1, 2], [1]), 1, 1, True)])
    words = filled(StepLayout.of_decodes(4, 2), plan, sampling_of(1, {}))
    assert words["adapter_slots"] == [-1, -1]
    assert set(words["adapter_rows"]) == {-1}


def test_fields_start_at_multiples_of_16_bytes() -> None:
    layout = StepLayout(7, 3, 2)
    assert all(field.start % 4 == 0 for field in layout.fields.values())
    assert layout.num_words % 4 == 0


def seated(seat: int, block_table: list[int]) -> Sequence:
    sequence = make_sequence([0], block_table)
    sequence.seat = seat
    return sequence


def test_tables_are_sent_once_and_grow_from_there() -> None:
    follower = TableFollower(num_tables=3, max_blocks=10)
    first, second = seated(2, [7, 8]), seated(0, [5])

    boarded = follower.follow(StepPlan([], [], [], [], [], boarded=(first, second), grown=(first,)))
    follower.sent()
    first.block_table += [9, 4]
    grown = follower.follow(StepPlan([], [], [], [], [], grown=(first,)))

    assert (boarded.places.tolist(), boarded.blocks.tolist()) == ([20, 21, 0], [7, 8, 5])
    assert (grown.places.tolist(), grown.blocks.tolist()) == ([22, 23], [9, 4])


def test_who_boards_a_seat_again_starts_its_table_anew() -> None:
    follower = TableFollower(num_tables=1, max_blocks=4)
    follower.follow(StepPlan([], [], [], [], [], boarded=(seated(0, [1, 2, 3]),)))
    follower.sent()
    entries = follower.follow(StepPlan([], [], [], [], [], boarded=(seated(0, [9]),)))
    assert (entries.places.tolist(), entries.blocks.tolist()) == ([0], [9])


def test_what_was_not_sent_goes_out_with_the_next_launch() -> None:
    # Given a launch that failed before its copy, and of its sequences one that has ended
    follower = TableFollower(num_tables=3, max_blocks=4)
    first, ended = seated(1, [7, 8]), seated(0, [3])
    follower.follow(StepPlan([], [], [], [], [], boarded=(first, ended)))
    ended.seat = None

    first.block_table.append(9)
    entries = follower.follow(StepPlan([], [], [], [], [], grown=(first,)))
    assert (entries.places.tolist(), entries.blocks.tolist()) == ([4, 5, 6], [7, 8, 9])


def test_a_table_longer_than_its_row_is_refused() -> None:
    follower = TableFollower(num_tables=2, max_blocks=2)
    with pytest.raises(RuntimeError, match="has 3 blocks, a table holds 2"):
        follower.follow(StepPlan([], [], [], [], [], boarded=(seated(0, [1, 2, 3]),)))


def test_entries_are_split_into_what_a_copy_holds() -> None:
    follower = TableFollower(num_tables=1, max_blocks=10)
    entries = follower.follow(StepPlan([], [], [], [], [], boarded=(seated(0, list(range(7))),)))
    assert [part.blocks.tolist() for part in entries.split(3)] == [[0, 1, 2], [3, 4, 5], [6]]
    follower.sent()
    nothing = follower.follow(StepPlan([], [], [], [], []))
    assert [part.blocks.tolist() for part in nothing.split(3)] == [[]]


def test_warm_up_has_the_largest_steps_and_all_powers_of_two() -> None:
    lengths = list(warm_up_lengths(max_num_tokens=100, max_num_sequences=8, context_length=200))
    assert lengths == [[100], [2] * 8, [16], [32], [64]]


def test_no_warm_up_is_longer_than_a_context() -> None:
    lengths = list(warm_up_lengths(max_num_tokens=100, max_num_sequences=8, context_length=30))
    assert lengths == [[30] * 3, [2] * 8, [16], [30], [30] * 2]


def test_idle_step_stays_in_the_spare_block() -> None:
    batch = idle_batch([1, 3], SPARE_ROW, 16)
    assert not batch.slot_mapping.any()
    assert batch.table_rows.tolist() == [SPARE_ROW, SPARE_ROW]
    assert (batch.positions.tolist(), batch.num_decodes) == ([0, 0, 1, 2], 1)
    assert torch.equal(batch.logit_rows, torch.tensor([0, 3]))
    assert idle_sampling(2).num_rows == 2
