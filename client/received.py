"""What has come of one choice, so that each token and each byte of text is handed on once.

Tokens are placed by their offset: what has come before is cut, what is missing is an error. Text has no offsets:
whoever continues a stream is told how many bytes came, and sends what is behind them.
"""

from __future__ import annotations

import grpc
from inflight.v1 import inference_pb2

from client.errors import InflightError


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

    def take(self, delta: inference_pb2.Delta) -> inference_pb2.Delta | None:
        """The part of an event that is new; None where nothing is.

        Raises:
            InflightError: tokens before it are missing, or others came in their place.
        """
        if delta.offset > self.num_tokens:
            missing = f"[{self.num_tokens}, {delta.offset})"
            raise InflightError(grpc.StatusCode.INTERNAL, f"tokens {missing} of choice {delta.choice} never came")
        new = inference_pb2.Delta()
        new.CopyFrom(delta)
        num_repeated = min(self.num_tokens - delta.offset, delta.num_tokens)
        if num_repeated:
            self._check_repeated(delta, num_repeated)
            new.offset += num_repeated
            new.num_tokens -= num_repeated
            del new.token_ids[:num_repeated]
            del new.logprobs[:num_repeated]
        if not (new.num_tokens or new.text):
            return None
        self.token_ids.extend(new.token_ids)
        self.num_tokens += new.num_tokens
        if self.text_bytes is not None:
            self.text_bytes += len(new.text.encode())
        return new

    def _check_repeated(self, delta: inference_pb2.Delta, num_repeated: int) -> None:
        repeated = delta.token_ids[:num_repeated]
        known = self.token_ids[delta.offset : delta.offset + len(repeated)]
        if self.has_all_ids and list(repeated) != known:
            text = f"the output of choice {delta.choice} is another one from token {delta.offset} on"
            raise InflightError(grpc.StatusCode.INTERNAL, text)
