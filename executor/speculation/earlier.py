"""Earlier outputs of an executor, which the proposers of later sequences look through. Pure.

They are kept by the cache salt, which names the tenant and the salt that the request brought. A sequence gets outputs
of its own salt only: a draft from another tenant's output would tell by its speed what that output was.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

# Newest tokens that are kept of a salt, and salts that are kept: 2 MB in all.
MAX_TOKENS_EACH = 2048
MAX_SALTS = 256


class EarlierOutputs:
    """The newest output tokens by salt; the salt that was used least recently is dropped first."""

    def __init__(self, max_tokens_each: int = MAX_TOKENS_EACH, max_salts: int = MAX_SALTS) -> None:
        self._max_tokens_each = max_tokens_each
        self._max_salts = max_salts
        self._outputs: OrderedDict[bytes, array[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._outputs)

    def add(self, salt: bytes | None, output_ids: Sequence[int]) -> None:
        """Keeps the end of an output, unless it has no salt."""
        if salt is None or not output_ids:
            return
        kept = self._outputs.setdefault(salt, array("i"))
        kept.extend(output_ids[-self._max_tokens_each :])
        del kept[: -self._max_tokens_each]
        self._outputs.move_to_end(salt)
        if len(self._outputs) > self._max_salts:
            self._outputs.popitem(last=False)

    def of(self, salt: bytes | None) -> tuple[int, ...]:
        """Returns the newest tokens of this salt, oldest first."""
        if salt is None or salt not in self._outputs:
            return ()
        self._outputs.move_to_end(salt)
        return tuple(self._outputs[salt])
