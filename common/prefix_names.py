"""Names of the prefixes of a prompt, and the positions of a prompt at which executors keep the state of recurrent
layers. Routers and executors compute both from the same tokens, so they agree without telling each other. Pure.

A name is eight bytes of a hash over salt and tokens. A wrong match, by chance of one in 2⁶⁴, costs a poor placement and
nothing else.

A chat template ends each message with a token that also ends an output (`<|im_end|>`, `<|eot_id|>`). So the ends of a
prompt's messages are found in its tokens alone: the first is that of the system's message with the tools, which all
conversations of an agent share, and the next turn, a fork or an edited message goes on from the last ones.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

# Ends of messages at which the state of a prompt is kept: of the first ones and of the last ones.
NUM_FIRST_ENDS = 2
NUM_LAST_ENDS = 3


class PrefixName:
    """The name of a prompt's prefixes, of increasing length."""

    def __init__(self, salt: bytes) -> None:
        self.num_tokens = 0
        # The salt has any length; its digest has a fixed one, so that it cannot be confused with tokens.
        self._hash = hashlib.blake2b(hashlib.blake2b(salt).digest(), digest_size=8)

    def of(self, token_ids: Sequence[int], num_tokens: int) -> bytes:
        """Returns the name of the first `num_tokens`, which are not fewer than in the call before."""
        self._hash.update(array("I", token_ids[self.num_tokens : num_tokens]).tobytes())
        self.num_tokens = num_tokens
        return self._hash.digest()


def name_salt(cache_salt: bytes, adapter_hash: str) -> bytes:
    """Returns the salt of the names of a request's prefixes. `adapter_hash` is in hexadecimal digits, '' for none."""
    return cache_salt + b"\0" + adapter_hash.encode() if adapter_hash else cache_salt


def state_positions(
    token_ids: Sequence[int], end_token_ids: Iterable[int], grid_tokens: int, num_last: int = NUM_LAST_ENDS
) -> tuple[int, ...]:
    """Returns the positions of a prompt at which its state is kept, in order: multiples of `grid_tokens`, the last ones
    before the ends of its first and of its `num_last` last messages, and before its last token."""
    ids = list(token_ids)
    positions = sorted({end // grid_tokens * grid_tokens for end in _message_ends(ids, end_token_ids)} - {0})
    chosen = {*positions[:NUM_FIRST_ENDS], *positions[-num_last:], (len(ids) - 1) // grid_tokens * grid_tokens}
    return tuple(sorted(chosen - {0}))


def _message_ends(ids: list[int], end_token_ids: Iterable[int]) -> Iterable[int]:
    for token_id in end_token_ids:
        end = 0
        for _ in range(ids.count(token_id)):
            end = ids.index(token_id, end) + 1
            yield end
