"""min_p, top_k and top_p in Triton: a threshold for each row that restricts the draw, found by bisection.

Float32 numbers are compared as integers in the same order (`key_of`), so that 32 passes over a row find an exact value:

    min_p      the largest value plus the logarithm of min_p, which the host computes
    top_k      the largest value that at least k of those tokens reach
    top_p      the smallest value above which there is less than top_p of the probability within these

Of the tokens equal to the threshold as many are kept as top_k and top_p allow, the lowest ids first.
"""

import triton
import triton.language as tl

from inflight.executor.kernels.sampling import scaled

ALL_IDS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def restrict_kernel(
    logits, temperatures, top_ks, top_ps, min_p_logs, banned_ids, banned_starts,
    edges,  # tokens above it are kept,
    last_ids,  # and those equal to it up to this id
    vocabulary_size, logits_stride, CHUNK: tl.constexpr,
):  # fmt: skip
    """Computes the thresholds. Grid: rows. A row without restrictions keeps everything and is not read."""
    row = tl.program_id(0)
    temperature, top_k, top_p = tl.load(temperatures + row), tl.load(top_ks + row), tl.load(top_ps + row)
    min_p_log = tl.load(min_p_logs + row)  # -inf for none
    limit = tl.where((top_k > 0) & (top_k < vocabulary_size), top_k, vocabulary_size)
    tl.store(edges + row, float("-inf"))
    tl.store(last_ids + row, ALL_IDS)
    if (temperature > 0.0) & ((limit < vocabulary_size) | (top_p < 1.0) | (min_p_log > float("-inf"))):
        values = logits + row.to(tl.int64) * logits_stride
        first_banned = tl.load(banned_starts + row)
        banned, count = banned_ids + first_banned, tl.load(banned_starts + row + 1) - first_banned
        highest = largest(values, vocabulary_size, temperature, banned, count, CHUNK)
        # Nothing is drawn from a row without a usable logit, whatever is kept.
        highest = tl.where(highest > float("-inf"), highest, 0.0)
        key = kth_largest(values, vocabulary_size, temperature, banned, count, limit, highest, CHUNK)
        floor = key_of(highest + min_p_log)
        if floor > key:
            # Fewer tokens reach min_p than top_k would keep.
            key = floor
            limit, _ = above(values, vocabulary_size, temperature, banned, count, floor - 1, highest, CHUNK)
        num_above, mass = above(values, vocabulary_size, temperature, banned, count, key, highest, CHUNK)
        # Without a restriction so far the key is that of -inf, and tokens equal to it have no weight.
        total = mass + (limit - num_above) * tl.exp(value_of(key) - highest)
        room = limit - num_above
        if top_p < 1.0:
            target = top_p * total
            key = mass_edge(values, vocabulary_size, temperature, banned, count, key, target, highest, CHUNK)
            num_above, mass = above(values, vocabulary_size, temperature, banned, count, key, highest, CHUNK)
            # A token is kept while those before it hold less than top_p; the first always is.
            needed = tl.ceil((target - mass) / tl.exp(value_of(key) - highest))
            room = tl.minimum((limit - num_above).to(tl.float32), tl.maximum(needed, 1.0)).to(tl.int32)
        last = nth_equal(values, vocabulary_size, temperature, banned, count, value_of(key), room, CHUNK)
        tl.store(edges + row, value_of(key))
        tl.store(last_ids + row, last)


@triton.jit
def key_of(value):
    """Returns an integer with the order of the float32."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0, which it equals
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def value_of(key):
    """Returns the float32 of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def largest(values, size, temperature, banned, count, CHUNK: tl.constexpr):
    """Returns the largest value of a row."""
    result = tl.full([CHUNK], float("-inf"), tl.float32)
    for start in range(0, size, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        result = tl.maximum(result, scaled(values, ids, size, temperature, banned, count))
    return tl.max(result, 0)


@triton.jit
def above(values, size, temperature, banned, count, key, highest, CHUNK: tl.constexpr):
    """Returns how many tokens are above a key, and the sum of their weights, relative to the largest value's weight."""
    number = tl.zeros([CHUNK], tl.int32)
    mass = tl.zeros([CHUNK], tl.float32)
    for start in range(0, size, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        value = scaled(values, ids, size, temperature, banned, count)
        is_above = (key_of(value) > key) & (ids < size)
        number += is_above.to(tl.int32)
        mass += tl.where(is_above, tl.exp(value - highest), 0.0)
    return tl.sum(number, 0), tl.sum(mass, 0)


@triton.jit
def kth_largest(values, size, temperature, banned, count, limit, highest, CHUNK: tl.constexpr):
    """Returns the key of the `limit`-th largest value; that of -inf if the limit is everything."""
    low = key_of(highest * 0.0 + float("-inf"))
    high = tl.where(limit < size, key_of(highest), low)
    while low < high:
        middle = low + (high - low + 1) // 2
        number, _ = above(values, size, temperature, banned, count, middle - 1, highest, CHUNK)
        low = tl.where(number >= limit, middle, low)
        high = tl.where(number >= limit, high, middle - 1)
    return low


@triton.jit
def mass_edge(values, size, temperature, banned, count, low, target, highest, CHUNK: tl.constexpr):
    """Returns the smallest key, from `low` on, above which there is less than `target`."""
    high = key_of(highest)
    while low < high:
        middle = low + (high - low) // 2
        _, mass = above(values, size, temperature, banned, count, middle, highest, CHUNK)
        low = tl.where(mass < target, low, middle + 1)
        high = tl.where(mass < target, middle, high)
    return low


@triton.jit
def nth_equal(values, size, temperature, banned, count, edge, number, CHUNK: tl.constexpr):
    """Returns the id of the `number`-th token that equals the edge; every id if there are no more than that."""
    low, high = number * 0, number * 0 + size - 1
    last = low + ALL_IDS
    if equal_up_to(values, size, temperature, banned, count, edge, high, CHUNK) > number:
        while low < high:
            middle = low + (high - low) // 2
            is_enough = equal_up_to(values, size, temperature, banned, count, edge, middle, CHUNK) >= number
            low = tl.where(is_enough, low, middle + 1)
            high = tl.where(is_enough, middle, high)
        last = low
    return last


@triton.jit
def equal_up_to(values, size, temperature, banned, count, edge, last, CHUNK: tl.constexpr):
    """Returns how many tokens with ids up to `last` equal the edge."""
    number = tl.zeros([CHUNK], tl.int32)
    for start in range(0, size, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        is_equal = scaled(values, ids, size, temperature, banned, count) == edge
        number += (is_equal & (ids <= last)).to(tl.int32)
    return tl.sum(number, 0)
