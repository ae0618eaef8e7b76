"""Sampling in Triton: the largest noisy logit of those kept, with the noise of `inflight.executor.step.sampling`.

A NaN is never chosen and has no weight. A row without a usable logit yields NO_TOKEN
(`inflight.executor.engine.runner`).

The random words are those of `inflight.executor.step.philox`, bit for bit: key = seed, counter = (id // 4, output
index, 0, 0), word `id % 4`. The noise made of them may differ in its last bits from that of torch.
"""

import triton
import triton.language as tl

MULTIPLIER_0 = tl.constexpr(0xD2511F53)
MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
INCREMENT_0 = tl.constexpr(0x9E3779B9)
INCREMENT_1 = tl.constexpr(0xBB67AE85)
ROUNDS = tl.constexpr(10)
# The same as in inflight.executor.step.sampling: 1 - 2**-24.
LARGEST_UNIFORM = tl.constexpr(0.999999940395355224609375)
WORD_SCALE = tl.constexpr(2.0**-32)
NO_TOKEN = tl.constexpr(-1)


@triton.jit
def draw_kernel(
    logits,  # [rows, vocabulary_size]
    temperatures, seeds_low, seeds_high, output_indices, banned_ids, banned_starts, edges, last_ids,
    best_values, best_ids, vocabulary_size, logits_stride, CHUNK: tl.constexpr,
):  # fmt: skip
    """Computes the winner of one chunk of the vocabulary of one row, the lowest id among equals. Grid: rows, chunks."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    counters = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
    row_logits = logits + row.to(tl.int64) * logits_stride
    first_banned = tl.load(banned_starts + row)
    banned, count = banned_ids + first_banned, tl.load(banned_starts + row + 1) - first_banned
    edge, last_id = tl.load(edges + row), tl.load(last_ids + row)
    temperature = tl.load(temperatures + row)
    word0 = counters.to(tl.uint32)
    word1, word2, word3 = word0 * 0, word0 * 0, word0 * 0
    # A greedy row needs neither random words nor the logarithms of noise.
    if temperature > 0.0:
        word1 = word1 + tl.load(output_indices + row).to(tl.uint32, bitcast=True)
        key0 = tl.load(seeds_low + row).to(tl.uint32, bitcast=True)
        key1 = tl.load(seeds_high + row).to(tl.uint32, bitcast=True)
        word0, word1, word2, word3 = philox(word0, word1, word2, word3, key0, key1)
        largest, winners = best_of_lanes(
            row_logits, counters, vocabulary_size, temperature, banned, count, edge, last_id,
            word0, word1, word2, word3, True,
        )  # fmt: skip
    else:
        largest, winners = best_of_lanes(
            row_logits, counters, vocabulary_size, 1.0, banned, count, edge, last_id,
            word0, word1, word2, word3, False,
        )  # fmt: skip
    best = tl.max(largest, 0)
    place = row * tl.num_programs(1) + chunk
    tl.store(best_values + place, best)
    tl.store(best_ids + place, tl.min(tl.where(largest == best, winners, 0x7FFFFFFF), 0))


@triton.jit
def best_of_lanes(
    row_logits, counters, vocabulary_size, divisor, banned, num_banned, edge, last_id,
    word0, word1, word2, word3, HAS_NOISE: tl.constexpr,
):  # fmt: skip
    """Returns the largest value of the four ids of each counter, and its id, the lowest among equals."""
    winners = counters * 4
    largest = tl.full(counters.shape, float("-inf"), tl.float32)
    for lane in tl.static_range(4):
        ids = counters * 4 + lane
        value = scaled(row_logits, ids, vocabulary_size, divisor, banned, num_banned)
        is_kept = (value > edge) | ((value == edge) & (ids <= last_id))
        value = tl.where(is_kept, value, float("-inf"))
        if HAS_NOISE:
            value += gumbel(word0 if lane == 0 else (word1 if lane == 1 else (word2 if lane == 2 else word3)))
        winners = tl.where(value > largest, ids, winners)
        largest = tl.maximum(value, largest)
    return largest, winners


@triton.jit
def choose_kernel(best_values, best_ids, token_ids, num_chunks, PADDED_CHUNKS: tl.constexpr):
    """Computes the winner of each row's chunks. Grid: rows."""
    row = tl.program_id(0)
    chunks = tl.arange(0, PADDED_CHUNKS)
    mask = chunks < num_chunks
    values = tl.load(best_values + row * num_chunks + chunks, mask=mask, other=float("-inf"))
    ids = tl.load(best_ids + row * num_chunks + chunks, mask=mask, other=0x7FFFFFFF)
    best = tl.max(values, 0)
    winner = tl.min(tl.where(values == best, ids, 0x7FFFFFFF), 0)
    winner = tl.where(best > float("-inf"), winner, NO_TOKEN)
    tl.store(token_ids + row, winner.to(token_ids.dtype.element_ty))


@triton.jit
def scaled(row_logits, ids, vocabulary_size, divisor, banned, num_banned):
    """Returns logits over the temperature, -inf where they are banned, NaN or beyond the vocabulary."""
    value = tl.load(row_logits + ids, mask=ids < vocabulary_size, other=float("-inf")).to(tl.float32) / divisor
    value = tl.where(value == value, value, float("-inf"))
    for index in range(num_banned):
        value = tl.where(ids == tl.load(banned + index), float("-inf"), value)
    return value


@triton.jit
def philox(word0, word1, word2, word3, key0, key1):
    """Computes Philox4x32-10 of uint32 words."""
    multiplier0 = word0 * 0 + MULTIPLIER_0
    multiplier1 = word0 * 0 + MULTIPLIER_1
    for _ in tl.static_range(ROUNDS):
        high0, high1 = tl.umulhi(word0, multiplier0), tl.umulhi(word2, multiplier1)
        low0, low1 = word0 * multiplier0, word2 * multiplier1
        word0, word1, word2, word3 = high1 ^ word1 ^ key0, low1, high0 ^ word3 ^ key1, low0
        key0, key1 = key0 + INCREMENT_0, key1 + INCREMENT_1
    return word0, word1, word2, word3


@triton.jit
def gumbel(word):
    """Returns -log(-log(1 - u)) with u the middle of the word's interval."""
    uniform = tl.minimum((word.to(tl.float32) + 0.5) * WORD_SCALE, LARGEST_UNIFORM)
    # log(1 - u) to the last bits where u is small, from a logarithm that is only as precise as its argument.
    rounded = 1.0 - uniform
    is_lost = rounded == 1.0
    ratio = tl.log(rounded) / tl.where(is_lost, 1.0, rounded - 1.0)
    return -tl.log(tl.where(is_lost, uniform, uniform * ratio))
