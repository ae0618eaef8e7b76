"""The keys of a pool in Redis.

A pool is a set of executors that serve the same model. All its keys share the hash tag `{pool}`, so that a script can
use them together on Redis Cluster. Every key is soft state: executors' reports and routers' submits rebuild it. The
keys have the prefix `inflight:<FORMAT>:{pool}:`. Records are packed (`scripts/schema.py`). Times are milliseconds of
the ledger's clock.

- `executors` (hash): executor → generation, seq, budget_blocks, total_blocks, budget_sequences, reserved_blocks,
  reserved_sequences, has_suspect, accepting, quantile (of the output length, which it reserves for), prefill speed,
  prefilled_ms (the estimated time by which it has computed its placements' prompts), ends_at_reservation, suspended
  (until its next report), claim (the request that it is kept for), last_report_ms, audited_ms, audit_due, adapter
  slots, number of placements that pin each adapter
- `room` (zset): executor that is not claimed → −available blocks; may still contain a silent executor
- `sizes` (zset): executor → total blocks
- `reports` (zset): executor → time of its last report
- `requests` (hash): request → owner, tenant, state, class, its demand and digest, its order, attempt, failures, the
  executors of undecided failures, how often others bypassed it; what its latest placement reserved and charged,
  and whether it was adopted
- `waiting:1` `waiting:2` `waiting:3` (zset by name): queue of a class: `tenant\\0deadline arrival request`; the
  deadline counts as at most one minute after the submit
- `active:1` `active:2` `active:3` (zset): tenant with waiting requests below its running limit → its virtual counter
- `placements` (zset by name): `executor\\0attempt\\0request` of all placed requests, to find those of an executor
- `lost` (zset): request taken back from an executor → when; its owner was notified
- `ended` (zset): recently ended request → when, so that a late report does not add it again
- `endings` (hash): request among `ended` that was placed → executor, generation, attempt, digest, whether it was
  cancelled
- `routers` (zset): router → end of its lease; 0 while it is being reaped
- `attended` (hash): last_ms: when `reap` was last called; since_ms: since when it has been called without a gap
- `state` (string): the pool's own state: arrivals, floor of the counters, sums over waiting requests, speed of the
  queue, quality of estimates, claims, options of the newest submit, the ledger's clock, its lead over the Redis clock,
  version
- `tenants` (hash): tenant → counter, weight, its waiting and running requests, when its rate buckets are full again
- `ageing` (zset): waiting request below the first class → when it moves up
- `lengths` (hash): `tenant\\0size`, and `\\0size` for all tenants → histogram of output lengths; a tenant's histograms
  are deleted with the tenant
- `preemptible` (zset): placed request of the last class, with `preempt_for_priority` of any but the first → its class
  and time
- `prefixes` `prefixes:old` (hash): prefix hash → executors that last got a prompt with this prefix, its tokens, and
  with recurrent layers until when its state counts as kept
- `adapters` (hash): executor with adapter slots → the hashes of the adapters that it serves, and which are resident
- `checkpoints` (hash): executor with recurrent layers → the names of the prefixes whose state it keeps
- `usage:<day>` (hash): tenant, class, adapter, class of executors → what was used on that day (`scripts/charge.lua`);
  kept for 90 days, and not soft state: only executors that still run can repeat it
- `usage:<day>:counted` (hash): executor, its generation, account → what is counted in the totals; kept for four days
- `usage:since` (string): when totals were first booked here, milliseconds since 1970. A Redis that lost its data has a
  later time
- `mailbox:<router>` (stream): events of the router's requests, about 10,000 entries

Outside the pools there is `inflight:secret`, which all routers share (`inflight.router.ledger.ledgers`).
"""

from __future__ import annotations

from dataclasses import dataclass

FORMAT = 2
"""The version of a pool's format in Redis. Increase it with every change that a router of the previous version would
misread: fields of records, names or contents of keys, kinds of events. Two formats can coexist in one Redis. Each has
its own ledger."""

FINGERPRINT = "a8066dedada213c1"
"""The hash of the record definitions of this format; a test compares it. It does not cover the other parts of the
format."""

POOL_KEYS = (
    "executors",
    "room",
    "sizes",
    "reports",
    "requests",
    "waiting:1",
    "waiting:2",
    "waiting:3",
    "active:1",
    "active:2",
    "active:3",
    "placements",
    "lost",
    "ended",
    "routers",
    "attended",
    "state",
    "tenants",
    "ageing",
    "lengths",
    "preemptible",
    "prefixes",
    "prefixes:old",
    "endings",
    "adapters",
    "checkpoints",
)
"""The order of KEYS in every script. `scripts/shared/records.lua` lists them in the same order."""

NUM_CLASSES = 3


@dataclass(frozen=True, slots=True)
class PoolKeys:
    """The key names of one pool."""

    pool: str

    def __post_init__(self) -> None:
        if not self.pool or "{" in self.pool or "}" in self.pool:
            raise ValueError(f"a pool's name is not empty and has no braces: {self.pool!r}")

    def key(self, name: str) -> str:
        """Returns the full key for a name of the module's docstring."""
        return f"inflight:{FORMAT}:{{{self.pool}}}:{name}"

    def mailbox(self, router_id: str) -> str:
        """Returns the key of the router's mailbox."""
        return self.key(f"mailbox:{router_id}")

    def usage(self, day: int) -> list[str]:
        """Returns the keys of the totals of a day, in days since 1970, of what is counted in them, and of the time
        since which totals are complete."""
        totals = self.key(f"usage:{day}")
        return [totals, f"{totals}:counted", self.key("usage:since")]

    def for_script(self, router_ids: tuple[str, ...]) -> list[str]:
        """Returns the KEYS of a script call that may write to the mailboxes of these routers."""
        return [self.key(name) for name in POOL_KEYS] + [self.mailbox(router_id) for router_id in router_ids]
