"""What has come of one choice, so that each token and each byte of text is handed on once.

Tokens are placed by their offset: what has come before is cut, what is missing is an error. Text has no offsets:
whoever continues a stream is told how many bytes came, and sends what is behind them.
"""

from __future__ import annotations

import grpc

from inflight.errors import InflightError
from inflight.v1 import inference_pb2


class Received:
    """One choice. `text_bytes` is None where the text before the stream's beginning is not known to us."""

    def __init__(
        self, token_ids: tuple[int, ...] = (), *, offset: int | None = None, text_bytes: int | None = 0
    ) -> None:
        self.token_ids = list(token_ids)
        self.num_tokens = len(self.token_ids) if offset is None else offset
        self.text_bytes = text_bytes
        self.has_finished = False

    @property
    def has_all_ids(self) -> bool:
        """Whether the id of each token is known, as it must be to continue without the server's copy."""
        return len(self.token_ids) == self.num_tokens

    def take(self, delta: inference_pb2.Delta) -> bool:
        """Takes an event in and cuts from it what has come before; False where nothing is left.

        Raises:
            InflightError: tokens before it are missing, or others came in their place.
        """
        if delta.offset > self.num_tokens:
            missing = f"[{self.num_tokens}, {delta.offset})"
            raise InflightError(grpc.StatusCode.INTERNAL, f"tokens {missing} of choice {delta.choice} never came")
        num_repeated = min(self.num_tokens - delta.offset, delta.num_tokens)
        if num_repeated:
            self._check_repeated(delta, num_repeated)
            delta.num_tokens -= num_repeated
            del delta.token_ids[:num_repeated]
            del delta.logprobs[:num_repeated]
        # Also where only text is left of it, which its tokens were sent ahead of.
        delta.offset = self.num_tokens
        if not (delta.num_tokens or delta.text):
            return False
        self.token_ids.extend(delta.token_ids)
        self.num_tokens += delta.num_tokens
        if self.text_bytes is not None:
            self.text_bytes += len(delta.text.encode())
        return True

    def _check_repeated(self, delta: inference_pb2.Delta, num_repeated: int) -> None:
        repeated = delta.token_ids[:num_repeated]
        known = self.token_ids[delta.offset : delta.offset + len(repeated)]
        if self.has_all_ids and list(repeated) != known:
            text = f"the output of choice {delta.choice} is another one from token {delta.offset} on"
            raise InflightError(grpc.StatusCode.INTERNAL, text)
