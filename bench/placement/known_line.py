"""What one executor was given, with exact knowledge of its cache: the oracle of the benchmark of real executors.

The executor's own bookkeeping of blocks, fed with the same requests in the same order, follows the cache. The rest is
as in `inflight.bench.simulation.oracle`: an executor computes prompts that have less left first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.prefix_cache import chain_hashes


@dataclass(slots=True)
class _Inside:
    """A request that has not ended."""

    hashes: Sequence[bytes]
    num_uncached: int
    table: list[int]
    has_first_token: bool = False


class KnownLine:
    """The requests of one executor and its blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._pool = BlockPool(num_blocks, block_size)
        self._inside: dict[str, _Inside] = {}

    @property
    def num_inside(self) -> int:
        """Requests that have not ended."""
        return len(self._inside)

    def cost(self, prompt: Sequence[int]) -> int:
        """Returns what giving the prompt to this executor now would cost, in prompt tokens that are computed before
        first tokens: its own, and those of the requests that it delays."""
        num_uncached = self._num_uncached(prompt, self._names(prompt))
        left = [one.num_uncached for one in self._inside.values() if not one.has_first_token]
        ahead = sum(num_left for num_left in left if num_left <= num_uncached)
        num_passed = sum(num_left > num_uncached for num_left in left)
        return ahead + num_uncached * (1 + num_passed)

    def give(self, request_id: str, prompt: Sequence[int]) -> int:
        """Records that the executor was given the prompt. Returns the tokens that are cached there or will be."""
        hashes = self._names(prompt)
        num_uncached = self._num_uncached(prompt, hashes)
        table = self._pool.share(hashes[: (len(prompt) - 1) // self._pool.block_size])
        table += self._pool.allocate(len(hashes) - len(table)) or []
        self._inside[request_id] = _Inside(hashes, num_uncached, table)
        return len(prompt) - num_uncached

    def first_token(self, request_id: str) -> None:
        """Records that the prompt is computed."""
        one = self._inside[request_id]
        one.has_first_token = True
        for block, block_hash in zip(one.table, one.hashes, strict=False):
            if not self._pool.is_published(block):
                self._pool.publish(block, block_hash)

    def end(self, request_id: str) -> None:
        """Records the end of a request. Its blocks stay in the cache."""
        self._pool.release(self._inside.pop(request_id).table)

    def _names(self, prompt: Sequence[int]) -> list[bytes]:
        return chain_hashes(prompt, self._pool.block_size, b"")

    def _num_uncached(self, prompt: Sequence[int], hashes: Sequence[bytes]) -> int:
        coming = {name for one in self._inside.values() if not one.has_first_token for name in one.hashes}
        num_found = 0
        for name in hashes[: (len(prompt) - 1) // self._pool.block_size]:
            if name not in coming and not self._pool.is_findable(name):
                break
            num_found += 1
        return len(prompt) - num_found * self._pool.block_size
