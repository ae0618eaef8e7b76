"""Placement by prefix with exact knowledge of what executors have cached, to compare with the ledger's records.

A request arrives with the number of prompt tokens that each executor has cached or computes already, as a directory of
all blocks would tell without any delay. A changed script takes these numbers in place of its records.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from inflight.bench.simulation.oracle import Commitment, ExecutorBacklog, hashes_of
from inflight.bench.simulation.sim_executor import SimExecutor
from inflight.bench.timeline.traffic import SimRequest

_RECORDED = re.compile(r"  local found = load_holders\(request\)\n  for i = #names, 1, -1 do\n.*?\n  end\n", re.DOTALL)
_TOLD = """  for id, cached in request.prefixes:gmatch('@(%S+):(%d+)') do
    seen[id] = true
    local executor = load_executor(id)
    if executor then
      consider(id, executor, tonumber(cached))
    end
  end
"""


def by_what_is_told(shared: str) -> str:
    """Returns the shared source with the numbers of the request in place of the ledger's records."""
    changed, count = _RECORDED.subn(lambda match: _TOLD, shared)
    assert count == 1
    return changed


def tell_cached_tokens(request: SimRequest, executors: Sequence[SimExecutor]) -> SimRequest:
    """Returns the request with what each executor has of its prompt, most first, as words among its prefixes."""
    known = sorted((-_num_cached(request, one), one.executor_id) for one in executors)
    words = [f"@{executor_id}:{-num_cached}" for num_cached, executor_id in known]
    return replace(request, prefix_hashes=(*request.prefix_hashes, *words))


def _num_cached(request: SimRequest, executor: SimExecutor) -> int:
    backlog, block_size = ExecutorBacklog(executor), executor.shape.block_size
    for sequence in executor.told():
        if sequence.num_computed < sequence.num_prompt_tokens:
            other = executor.request_of(sequence)
            backlog.inside[other.request_id] = Commitment(other, hashes_of(other, block_size), 0)
    return len(request.prompt) - backlog.num_uncached(request, hashes_of(request, block_size))
