"""min_p, top_k and top_p in Triton: a threshold for each row that restricts the draw, found in a few passes over it.

    min_p      the largest value plus the logarithm of min_p, which the host computes
    top_k      the largest value that at least k of those tokens reach
    top_p      the smallest value above which there is less than top_p of the probability within these

Of the tokens equal to the threshold as many are kept as top_k and top_p allow, the lowest ids first.

The first pass finds the largest value and takes a sample of `CHUNK` values. The second counts the tokens from a value
on that, by the sample, some thousands reach, and lists their ids. If the threshold is among them, as nearly always, the
rest is a bisection of at most `CHUNK` numbers in registers. Otherwise further passes, each at the median of the sample
in what is left, find a part of the row that fits (selection by sampling, after Floyd and Rivest). The result does not
depend on the sample.

Float32 numbers are bisected as integers in the same order (`key_of`), which ends after 32 halves.
"""

import triton
import triton.language as tl

from inflight.executor.kernels.sampling import scaled

ALL_IDS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def restrict_kernel(
    logits, temperatures, top_ks, top_ps, min_p_logs, banned_ids, banned_starts,
    listed_ids,  # [rows, CHUNK], overwritten
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
        values, listed = logits + row.to(tl.int64) * logits_stride, listed_ids + row.to(tl.int64) * CHUNK
        first_banned = tl.load(banned_starts + row)
        banned, count = banned_ids + first_banned, tl.load(banned_starts + row + 1) - first_banned
        highest, sample = survey(values, vocabulary_size, temperature, banned, count, CHUNK)
        # Nothing is drawn from a row without a usable logit, whatever is kept.
        highest = tl.where(highest > float("-inf"), highest, 0.0)
        key, high = key_of(highest + min_p_log), key_of(highest)
        pivot = first_pivot(sample, vocabulary_size, key, high, CHUNK)
        number, mass, num_likely, total = list_tokens(
            values, vocabulary_size, temperature, banned, count, listed, key, pivot, high, highest, CHUNK
        )
        limit = tl.minimum(limit, num_likely)
        num_listed, is_listed, room = number, number <= CHUNK, limit
        if limit < num_likely:
            key, num_above, mass_above, num_listed, is_listed, is_intact = search(
                values, vocabulary_size, temperature, banned, count, sample, listed, is_listed, key, pivot, high,
                number, mass, limit, float("inf"), highest, CHUNK,
            )  # fmt: skip
            room = limit - num_above
            total = mass_above + room * tl.exp(value_of(key) - highest)
        else:
            is_intact = is_listed
        if top_p < 1.0:
            target = top_p * total
            key, num_above, mass_above, num_listed, is_listed, is_intact = search(
                values, vocabulary_size, temperature, banned, count, sample, listed, is_intact, key, pivot, high,
                number, mass, limit, target, highest, CHUNK,
            )  # fmt: skip
            # A token is kept while those before it hold less than top_p; the first always is.
            needed = tl.ceil((target - mass_above) / tl.exp(value_of(key) - highest))
            room = tl.minimum((limit - num_above).to(tl.float32), tl.maximum(needed, 1.0)).to(tl.int32)
        tl.store(edges + row, value_of(key))
        if room < num_likely:
            last_id = nth_equal(
                values, vocabulary_size, temperature, banned, count, listed, num_listed, is_listed, value_of(key),
                room, CHUNK,
            )  # fmt: skip
            tl.store(last_ids + row, last_id)


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
def survey(values, size, temperature, banned, count, CHUNK: tl.constexpr):
    """Returns the largest value of a row, and one value of every lane, each of another chunk than its neighbours'."""
    lanes = tl.arange(0, CHUNK)
    num_chunks = tl.cdiv(size, CHUNK)
    largest = tl.full([CHUNK], float("-inf"), tl.float32)
    sample = largest
    for chunk in range(num_chunks):
        value = scaled(values, chunk * CHUNK + lanes, size, temperature, banned, count)
        largest = tl.maximum(largest, value)
        sample = tl.where(lanes % num_chunks == chunk, value, sample)
    return tl.max(largest, 0), sample


@triton.jit
def first_pivot(sample, size, low, high, CHUNK: tl.constexpr):
    """Returns a key in `[low, high]` that fewer than `CHUNK` tokens reach, by the sample: so many that most thresholds
    are among them, and so few that an error of the sample of five standard deviations does no harm."""
    pivot = low
    if size > CHUNK:
        rank = CHUNK // 8 * 5 // tl.cdiv(size, CHUNK)
        pivot = bisect(sample, tl.zeros_like(sample), low, high, 0, 0.0, rank, float("inf"))
    return pivot


@triton.jit
def bisect(tile, weights, low, high, num_above, mass_above, limit, target):
    """Returns the smallest key in `[low, high]` above which there are fewer than `limit` tokens, and less than `target`
    of their weights: those of the tile, and `num_above` others with `mass_above`."""
    while low < high:
        middle = low + (high - low) // 2
        is_above = tile > value_of(middle)
        number = num_above + tl.sum(is_above.to(tl.int32), 0)
        mass = mass_above + tl.sum(tl.where(is_above, weights, 0.0), 0)
        is_enough = (number < limit) & (mass < target)
        low = tl.where(is_enough, low, middle + 1)
        high = tl.where(is_enough, middle, high)
    return low


@triton.jit
def search(
    values, size, temperature, banned, count, sample, listed, is_listed, low, pivot, high, number, mass,
    limit, target, highest, CHUNK: tl.constexpr,
):  # fmt: skip
    """Returns the smallest key in `[low, high]` above which there are fewer than `limit` tokens with less than `target`
    of the weight, and what is above it: number and mass. `high` is the key of the largest value.

    `number` tokens with `mass` have keys from `pivot` on; `is_listed`: their ids are listed. Also returned are the
    length of the list, whether it has the tokens of the returned key, and whether it is the list that was given.
    """
    num_above, mass_above = 0, 0.0  # above `high`
    num_left = size  # at most so many are in [low, high]
    has_list, is_intact, is_open = is_listed, is_listed, True
    while is_open:
        is_below = (num_above + number < limit) & (mass_above + mass < target) & (pivot > low)
        low, high = tl.where(is_below, low, tl.maximum(low, pivot)), tl.where(is_below, pivot - 1, high)
        has_list = is_listed & (is_below == 0)
        num_left = tl.where(is_below, num_left - number, number)
        num_above += tl.where(is_below, number, 0)
        mass_above += tl.where(is_below, mass, 0.0)
        is_open = (low < high) & (has_list == 0)
        if is_open:
            pivot = next_pivot(sample, low, high, num_left <= CHUNK)
            number, mass, _, _ = list_tokens(
                values, size, temperature, banned, count, listed, low, pivot, high, highest, CHUNK
            )
            is_listed, is_intact = number <= CHUNK, False
    if has_list:
        tile = listed_values(values, size, temperature, banned, count, listed, number, CHUNK)
        weights = tl.exp(tile - highest)
        low = bisect(tile, weights, low, high, num_above, mass_above, limit, target)
        is_above = tile > value_of(low)
        num_above += tl.sum(is_above.to(tl.int32), 0)
        mass_above += tl.sum(tl.where(is_above, weights, 0.0), 0)
    return low, num_above, mass_above, number, has_list, is_intact


@triton.jit
def next_pivot(sample, low, high, is_last):
    """Returns a key in `(low, high]` that halves what is left by the sample, or by keys if the sample has none there;
    `low` if everything that is left can be listed."""
    is_inside = (sample >= value_of(low)) & (sample <= value_of(high))
    number = tl.sum(is_inside.to(tl.int32), 0)
    median = low + (high - low + 1) // 2
    if number > 0:
        inside, half = tl.where(is_inside, sample, float("-inf")), (number + 1) // 2
        found = bisect(inside, tl.zeros_like(inside), low, high, 0, 0.0, half, float("inf"))
        median = tl.maximum(found, low + 1)
    return tl.where(is_last, low, median)


@triton.jit
def list_tokens(
    values, size, temperature, banned, count, listed, low, pivot, high, highest, CHUNK: tl.constexpr
):  # fmt: skip
    """Lists the ids of the tokens with keys in `[pivot, high]`, at most CHUNK, in ascending order. Returns their number
    and mass, relative to the largest value's weight, and those of all tokens from `low` on."""
    lanes = tl.arange(0, CHUNK)
    least, bottom, top = value_of(low), value_of(pivot), value_of(high)
    number, num_all = 0, tl.zeros([CHUNK], tl.int32)
    mass, mass_all = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    tl.debug_barrier()  # other threads may still read the list before
    for start in range(0, size, CHUNK):
        ids = start + lanes
        value = scaled(values, ids, size, temperature, banned, count)
        weight = tl.exp(value - highest)
        is_likely = (value >= least) & (ids < size)
        num_all += is_likely.to(tl.int32)
        mass_all += tl.where(is_likely, weight, 0.0)
        is_in = (value >= bottom) & (value <= top) & (ids < size)
        mass += tl.where(is_in, weight, 0.0)
        places = number + tl.cumsum(is_in.to(tl.int32), 0) - 1
        tl.store(listed + places, ids, mask=is_in & (places < CHUNK))
        number += tl.sum(is_in.to(tl.int32), 0)
    tl.debug_barrier()
    return number, tl.sum(mass, 0), tl.sum(num_all, 0), tl.sum(mass_all, 0)


@triton.jit
def listed_values(values, size, temperature, banned, count, listed, number, CHUNK: tl.constexpr):
    """Returns the values of the listed tokens, and -inf behind them."""
    places = tl.arange(0, CHUNK)
    ids = tl.load(listed + places, mask=places < number, other=size)
    return scaled(values, ids, size, temperature, banned, count)


@triton.jit
def nth_equal(
    values, size, temperature, banned, count, listed, num_listed, is_listed, edge, number, CHUNK: tl.constexpr
):  # fmt: skip
    """Returns the id of the `number`-th token that equals the edge, of the listed ones or of all; every id if there are
    fewer."""
    lanes = tl.arange(0, CHUNK)
    last, seen = number * 0 + ALL_IDS, 0
    for start in range(0, tl.where(is_listed, num_listed, size), CHUNK):
        ids = start + lanes
        if is_listed:
            ids = tl.load(listed + ids, mask=ids < num_listed, other=size)
        is_equal = (scaled(values, ids, size, temperature, banned, count) == edge) & (ids < size)
        order = seen + tl.cumsum(is_equal.to(tl.int32), 0)
        last = tl.minimum(last, tl.min(tl.where(is_equal & (order == number), ids, ALL_IDS), 0))
        seen += tl.sum(is_equal.to(tl.int32), 0)
    return last
