"""Chain hashes of a prompt's prefixes, by which the ledger finds the executor that has computed the longest of them.

Pure. Two prompts share a hash if tenant, salt and all tokens of the prefix agree. Only prefixes of 1, 2, 4, 8, … full
blocks and the longest one are hashed. So a match is at least half as long as the shared prefix, and the number of
hashes stays small. A wrong match, by chance of one in 2⁶⁴, costs a poor placement and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
from array import array
from collections.abc import Sequence

MAX_PREFIXES = 12


def prefix_hashes(prompt_ids: Sequence[int], block_size: int, salt: bytes) -> tuple[str, ...]:
    """Returns the hashes, shortest prefix first; none for a prompt without a full block."""
    token_bytes = array("I", prompt_ids).tobytes()
    bytes_per_block = block_size * array("I").itemsize
    # The salt has any length; its digest has a fixed one, so that it cannot be confused with tokens.
    running = hashlib.blake2b(hashlib.blake2b(salt).digest(), digest_size=8)
    names: list[str] = []
    start = 0
    for num_blocks in named_block_counts(len(prompt_ids) // block_size):
        end = num_blocks * bytes_per_block
        running.update(token_bytes[start:end])
        names.append(base64.urlsafe_b64encode(running.digest()).rstrip(b"=").decode())
        start = end
    return tuple(names)


def named_block_counts(num_full_blocks: int) -> tuple[int, ...]:
    """Returns the lengths in blocks of the hashed prefixes. For a very long prompt the shortest prefixes are left
    out."""
    powers = [1 << exponent for exponent in range(num_full_blocks.bit_length())]
    if powers and powers[-1] != num_full_blocks:
        powers.append(num_full_blocks)
    return tuple(powers[-MAX_PREFIXES:])
