"""Kernels that expose intermediate results of the product's kernels."""

import triton
import triton.language as tl

from inflight.executor.kernels.sampling import gumbel, philox


@triton.jit
def words_kernel(counters, words, output_index, key0, key1, COUNT: tl.constexpr):
    """`words[4, COUNT]` of the counters."""
    lanes = tl.arange(0, COUNT)
    word0 = tl.load(counters + lanes).to(tl.uint32, bitcast=True)
    word1 = word0 * 0 + output_index.to(tl.uint32, bitcast=True)
    word0, word1, word2, word3 = philox(
        word0, word1, word0 * 0, word0 * 0, key0.to(tl.uint32, bitcast=True), key1.to(tl.uint32, bitcast=True)
    )
    tl.store(words + lanes, word0.to(tl.int32, bitcast=True))
    tl.store(words + COUNT + lanes, word1.to(tl.int32, bitcast=True))
    tl.store(words + 2 * COUNT + lanes, word2.to(tl.int32, bitcast=True))
    tl.store(words + 3 * COUNT + lanes, word3.to(tl.int32, bitcast=True))


@triton.jit
def noise_kernel(words, noise, COUNT: tl.constexpr):
    """The noise made of words."""
    lanes = tl.arange(0, COUNT)
    tl.store(noise + lanes, gumbel(tl.load(words + lanes).to(tl.uint32, bitcast=True)))
