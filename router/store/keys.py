"""The keys of a pool in Redis.

A pool is a set of executors that serve the same model. All its keys share the hash tag `{pool}`, so that a script may
use them together on Redis Cluster. Every key is soft state: reports and routers rebuild it. Under
`inflight:<FORMAT>:{pool}:` there are, records packed, times in milliseconds of the ledger's clock
(`shared/records.lua`):

- `executors` (hash): executor → generation, seq, budget_blocks, total_blocks, budget_sequences, reserved_blocks,
  reserved_sequences, has_suspect, accepting, quantile that it reserves for, speed of prefill, prefilled_ms (when it
  will have computed the prompts that it was given), whether it ends placements at their reservations, suspended (until
  its next report), claim (the request that it is kept for), last_report_ms, audited_ms, audit_due, adapter slots, how
  many placements pin each adapter
- `room` (zset): executor that is not claimed → −available blocks; a silent executor may linger
- `sizes` (zset): executor → total blocks
- `reports` (zset): executor → time of its last report
- `requests` (hash): request → owner, tenant, state, class, what it asks for and the digest of it, its order, attempt,
  strikes and whom those blame that are undecided, times passed; what its latest placement reserved and charged, and
  whether it was adopted
- `waiting:1` `waiting:2` `waiting:3` (zset by name): queue of a class: `tenant\\0deadline arrival request`; at most a
  minute ahead counts as deadline
- `active:1` `active:2` `active:3` (zset): tenant with waiting requests below its running limit → its virtual counter
- `placements` (zset by name): `executor\\0attempt\\0request` of all that are placed, to find an executor's
- `lost` (zset): request taken back from an executor → when; its owner was notified
- `ended` (zset): recently ended request → when: a late report must not add it again
- `endings` (hash): request among `ended` that was placed → executor, generation, attempt, digest, whether it was
  cancelled
- `routers` (zset): router → end of its lease; 0 while it is being reaped
- `attended` (hash): last_ms, since_ms: since when `reap` has been called without a gap
- `state` (string): the pool's own state: arrivals, floor of the counters, sums over waiting requests, speed of the
  queue, quality of estimates, claims, options of the newest submit, the ledger's clock and how far it is ahead of
  Redis', version
- `tenants` (hash): tenant → counter, weight, its waiting and running requests, when its rate buckets are full again
- `ageing` (zset): waiting request below the first class → when it moves up
- `lengths` (hash): `tenant\\0size`, and `\\0size` for all → histogram of output lengths; a tenant's go with it
- `preemptible` (zset): placed request below the first class → class and time; only if the first class may preempt
- `prefixes` `prefixes:old` (hash): prefix hash → executor that last got a prompt with it
- `adapters` (hash): executor with adapter slots → the hashes of the adapters that it serves, and which are resident
- `mailbox:<router>` (stream): events of the router's requests, about 10,000 entries

Beside the pools there is `inflight:secret`, which all routers share (`secret`). Where a model has several sub-pools,
each is a pool `model#k`, and a string `claim:<request>` beside its keys says which sub-pool has a request
(`router.subpools.claims`).
"""

from __future__ import annotations

from dataclasses import dataclass

FORMAT = 2
"""The version of a pool's format in Redis. Increase it with every change that a router of the previous version would
misread: fields of records, names or contents of keys, kinds of events. Two formats coexist, each with its own
ledger."""

FINGERPRINT = "490ea158bb40bed6"
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
)
"""The order of KEYS in every script; `scripts/shared/records.lua` names them in the same order."""

NUM_CLASSES = 3


@dataclass(frozen=True, slots=True)
class PoolKeys:
    """The key names of one pool."""

    pool: str

    def __post_init__(self) -> None:
        if not self.pool or "{" in self.pool or "}" in self.pool:
            raise ValueError(f"a pool's name is not empty and has no braces: {self.pool!r}")

    def key(self, name: str) -> str:
        """Returns the key with this name in the table above."""
        return f"inflight:{FORMAT}:{{{self.pool}}}:{name}"

    def mailbox(self, router_id: str) -> str:
        """Returns the key of the router's mailbox."""
        return self.key(f"mailbox:{router_id}")

    def for_script(self, router_ids: tuple[str, ...]) -> list[str]:
        """Returns KEYS of a script call that may write to these routers' mailboxes."""
        return [self.key(name) for name in POOL_KEYS] + [self.mailbox(router_id) for router_id in router_ids]
