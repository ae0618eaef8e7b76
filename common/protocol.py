"""Versions and limits of the protocol between routers and executors, the same at both ends."""

from __future__ import annotations

# Older versions are accepted too, so that executors can be replaced before routers or after them.
MIN_PROTOCOL_VERSION = 1
PROTOCOL_VERSION = 4
# The first version with `Attach`, `attached` and `detached`.
ATTACH_VERSION = 2
# The first version whose executors read everything that changes logits, constraints, and prompt scores. Older ones
# refuse the values that they know and ignore the others.
LOGITS_VERSION = 3
# The first version whose executors end a placement at the end of its reservation. Older ones refuse a reservation that
# does not hold all of `max_tokens`.
RESERVATION_VERSION = 4

# As in OpenAI's API.
MAX_TOP_LOGPROBS = 20
# The buffers of a step fit this many in each row.
MAX_STOP_TOKEN_IDS = 256
# Of one request, as in OpenAI's API; each choice is a sequence with a prompt of its own in the queue.
MAX_CHOICES = 128
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
