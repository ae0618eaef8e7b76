"""Versions and limits of the protocol between routers and executors, and the names of prefixes, the same at both ends.

A name is eight bytes of a hash over salt and tokens. A wrong match, by chance of one in 2⁶⁴, costs a poor placement and
nothing else. The positions of a prompt at which executors keep the state of recurrent layers follow from its tokens as
well: a chat template ends each message with a token that also ends an output (`<|im_end|>`, `<|eot_id|>`). The first
message is that of the system with the tools, which all conversations of an agent share, and the next turn, a fork or an
edited message goes on from the last ones.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Sequence

# Older versions are accepted too, so that executors can be replaced before routers or after them.
MIN_PROTOCOL_VERSION = 1
PROTOCOL_VERSION = 5
# The first version with `Attach`, `attached` and `detached`.
ATTACH_VERSION = 2
# The first version whose executors read everything that changes logits, constraints, and prompt scores. Older ones
# refuse the values that they know and ignore the others.
LOGITS_VERSION = 3
# The first version whose executors end a placement at the end of its reservation. Older ones refuse a reservation that
# does not hold all of `max_tokens`.
RESERVATION_VERSION = 4
# The first version whose executors read `exact_resume`. Older ones ignore it, whatever their engine can keep.
EXACT_RESUME_VERSION = 5

# As in OpenAI's API.
MAX_TOP_LOGPROBS = 20
# The buffers of a step fit this many in each row.
MAX_STOP_TOKEN_IDS = 256
# Of one request, as in OpenAI's API; each choice is a sequence with a prompt of its own in the queue.
MAX_CHOICES = 128
# The content hash of an adapter. The ledger searches a text for it, so it must have no other characters.
ADAPTER_HASH = re.compile("[0-9a-f]{64}")
# Of a request's sampling parameters.
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_ALLOWED_TOKEN_IDS = 65_536
MAX_BAD_WORDS = 128
MAX_BAD_WORD_SEQUENCES = 2 * MAX_BAD_WORDS
MAX_BAD_WORD_IDS = 1024
MAX_PENALTY = 2.0
# A minute between tokens is no limit in practice.
MAX_INTER_TOKEN_TARGET_MS = 60_000
# Tokens drafted for one sequence in one step. Few drafts survive this far.
MAX_DRAFTS = 64
# Rows of logits that a step computes for log probabilities of prompts, over all its sequences.
MAX_PROMPT_LOGPROB_ROWS = 64
# A canonical grammar, in bytes.
MAX_GRAMMAR_BYTES = 256 * 1024
# Limit of one frame, at 15 bytes a token at most. Tokens collected for a slow reader, or repeated for a router that
# attaches, must not exceed the largest message.
MAX_FRAME_TOKENS = 2**20
# The same for log probabilities of prompts, at 340 bytes each.
MAX_FRAME_PROMPT_LOGPROBS = 2**15
# Most tokens of a sequence that wait for a step frame. If the executor dies, they are generated again elsewhere.
MAX_FRAME_INTERVAL = 16

# Intervals of the statistics that a reader subscribes to.
DEFAULT_STATS_INTERVAL_MS = 1000
MIN_STATS_INTERVAL_MS = 50

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
