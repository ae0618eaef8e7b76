"""Changes of logits before the draw in Triton: biases, penalties and masks, as in `inflight.executor.logits.reference`.

A row is copied as float32, with -inf for NaN and for the ids that its mask leaves out, and then changed at the ids that
have a bias or a penalty. The reference applies the mask last; the result is the same, since no change turns -inf into
another number.

Each operation is rounded by itself. `change_kernel` must be compiled with `enable_fp_fusion=False`: otherwise a product
and the subtraction behind it may become one operation, with one rounding. Its division is that of IEEE 754; `/` would
be an approximation on a GPU.
"""

import triton
import triton.language as tl

from inflight.executor.kernels.sampling import NO_TOKEN

# As `inflight.executor.scheduler.sequence.ALL_EXCLUDED`.
ALL_EXCLUDED = tl.constexpr(-2)


@triton.jit
def copy_kernel(
    logits,  # [rows, vocabulary_size]
    changed,  # [rows, vocabulary_size] float32, contiguous
    mask_indices,  # of each row; negative: every id is allowed
    masks,  # bit `id % 32` of word `id // 32` is set if the id is allowed
    vocabulary_size, logits_stride, num_mask_words, CHUNK: tl.constexpr,
):  # fmt: skip
    """Copies a chunk of a row. Grid: rows, chunks."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    exists = ids < vocabulary_size
    value = tl.load(logits + row.to(tl.int64) * logits_stride + ids, mask=exists, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("-inf"))
    index = tl.load(mask_indices + row)
    words = tl.load(masks + index * num_mask_words + ids // 32, mask=exists & (index >= 0), other=-1)
    value = tl.where(((words >> (ids & 31)) & 1) != 0, value, float("-inf"))
    tl.store(changed + row.to(tl.int64) * vocabulary_size + ids, value, mask=exists)


@triton.jit
def change_kernel(
    changed,  # [rows, vocabulary_size] float32, contiguous
    starts,  # row i has the entries [starts[i], starts[i + 1])
    ids, biases,  # of each entry; no id twice in a row
    counts,  # of each entry: how often the id is in the output; negative: not in the prompt either
    repetitions, frequencies, presences,  # penalties of each row
    unread_places,  # of each row's newest token in `token_ids`, if it is not counted; negative: all are counted
    token_ids, vocabulary_size, TILE: tl.constexpr,
):  # fmt: skip
    """Changes a row at a tile of its entries, or at its newest token if that is not one of them. Grid: rows, tiles and
    one more."""
    row = tl.program_id(0)
    first, end = tl.load(starts + row), tl.load(starts + row + 1)
    unread_place = tl.load(unread_places + row)
    unread_id = tl.load(token_ids + unread_place, mask=unread_place >= 0, other=-1)
    repetition = tl.load(repetitions + row)
    frequency, presence = tl.load(frequencies + row), tl.load(presences + row)
    logits = changed + row.to(tl.int64) * vocabulary_size
    if tl.program_id(1) < tl.num_programs(1) - 1:
        entry = first + tl.program_id(1) * TILE + tl.arange(0, TILE)
        exists = entry < end
        entry_ids = tl.load(ids + entry, mask=exists, other=0)
        value = tl.load(logits + entry_ids, mask=exists, other=0.0) + tl.load(biases + entry, mask=exists, other=0.0)
        count = tl.load(counts + entry, mask=exists, other=-1)
        count = tl.where(entry_ids == unread_id, tl.maximum(count, 0) + 1, count)
        tl.store(logits + entry_ids, penalised(value, count, repetition, frequency, presence), mask=exists)
    elif unread_id >= 0:
        number = 0
        for start in range(first, end, TILE):
            entry = start + tl.arange(0, TILE)
            is_unread = tl.load(ids + entry, mask=entry < end, other=-1) == unread_id
            number += tl.sum(is_unread.to(tl.int32), 0)
        if number == 0:
            value = tl.load(logits + unread_id)
            tl.store(logits + unread_id, penalised(value, number + 1, repetition, frequency, presence))


@triton.jit
def penalised(value, count, repetition, frequency, presence):
    """Returns a logit of an id that is `count` times in the output, or negative: not in the prompt either."""
    repeated = tl.where(value > 0.0, tl.div_rn(value, repetition), value * repetition)
    value = tl.where(count >= 0, repeated, value)
    less = value - count.to(tl.float32) * frequency - presence
    return tl.where(count > 0, less, value)


@triton.jit
def name_excluded_kernel(logits, token_ids, vocabulary_size, logits_stride, CHUNK: tl.constexpr):
    """Writes ALL_EXCLUDED in place of NO_TOKEN where a row has a usable logit. Grid: rows. Only rows without a token
    are read."""
    row = tl.program_id(0)
    if tl.load(token_ids + row) == NO_TOKEN:
        values = logits + row.to(tl.int64) * logits_stride
        largest = tl.full([CHUNK], float("-inf"), tl.float32)
        for start in range(0, vocabulary_size, CHUNK):
            ids = start + tl.arange(0, CHUNK)
            value = tl.load(values + ids, mask=ids < vocabulary_size, other=float("-inf")).to(tl.float32)
            largest = tl.maximum(largest, tl.where(value == value, value, float("-inf")))
        if tl.max(largest, 0) > float("-inf"):
            tl.store(token_ids + row, ALL_EXCLUDED)
