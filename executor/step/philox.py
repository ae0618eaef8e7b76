"""Counter-based random numbers: Philox4x32-10.

J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A number
is a pure function of a key and a counter, so it can be had in any order, on any device, in any company.

torch has no unsigned 32-bit arithmetic everywhere; words are kept in int64. A product of two words wraps around in
the top bit of an int64, which is the same bits as the unsigned product.
"""

from __future__ import annotations

from torch import Tensor

MASK = 0xFFFF_FFFF
ROUNDS = 10
# Multipliers and key increments of the paper, section 4.3.
MULTIPLIERS = (0xD251_1F53, 0xCD9E_8D57)
KEY_INCREMENTS = (0x9E37_79B9, 0xBB67_AE85)

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox_words(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four words for every counter. Words are int64 tensors in `[0, 2**32)` that broadcast against each other."""
    word0, word1, word2, word3 = counter
    key0, key1 = key
    for _ in range(ROUNDS):
        product0, product1 = word0 * MULTIPLIERS[0], word2 * MULTIPLIERS[1]
        # The low halves are not cut off here: they are only xor-ed, and what comes of that is.
        word0, word1 = _mixed(product1, word1, key0), product1
        word2, word3 = _mixed(product0, word3, key1), product0
        key0, key1 = (key0 + KEY_INCREMENTS[0]) & MASK, (key1 + KEY_INCREMENTS[1]) & MASK
    return word0, word1 & MASK, word2, word3 & MASK


def _mixed(product: Tensor, word: Tensor, key: Tensor) -> Tensor:
    """High half of the product ^ word ^ key; in place, for it is done ten times over all of a vocabulary."""
    high = product >> 32
    if word.numel() > high.numel() or key.numel() > high.numel():
        return (high ^ word ^ key) & MASK
    return high.bitwise_xor_(word).bitwise_xor_(key).bitwise_and_(MASK)
