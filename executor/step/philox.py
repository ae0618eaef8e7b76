"""Counter-based random numbers: Philox4x32-10.

J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A number is
a pure function of a key and a counter, so it does not depend on order, device or the other numbers.

torch lacks unsigned 32-bit arithmetic on some devices, so words are kept in int64. A product of two words may wrap into
the top bit of an int64, with the same bits as the unsigned product.
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
    """Returns four words for every counter. Words are int64 tensors in `[0, 2**32)` that broadcast against each
    other."""
    word0, word1, word2, word3 = counter
    key0, key1 = key
    for _ in range(ROUNDS):
        product0, product1 = word0 * MULTIPLIERS[0], word2 * MULTIPLIERS[1]
        # The low halves are not masked here: they are only xor-ed, and the result is masked.
        word0, word1 = _mixed(product1, word1, key0), product1
        word2, word3 = _mixed(product0, word3, key1), product0
        key0, key1 = (key0 + KEY_INCREMENTS[0]) & MASK, (key1 + KEY_INCREMENTS[1]) & MASK
    return word0, word1 & MASK, word2, word3 & MASK


def _mixed(product: Tensor, word: Tensor, key: Tensor) -> Tensor:
    """Returns the high half of the product ^ word ^ key, computed in place, because it runs ten times over whole
    vocabularies."""
    high = product >> 32
    if word.numel() > high.numel() or key.numel() > high.numel():
        return (high ^ word ^ key) & MASK
    return high.bitwise_xor_(word).bitwise_xor_(key).bitwise_and_(MASK)
