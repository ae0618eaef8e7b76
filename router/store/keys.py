"""The keys of a pool: the whole map of what the store keeps in Redis.

A pool is a set of executors that serve the same model. All its keys share the hash tag `{pool}`, so that a script may
use them together on Redis Cluster. Every key is soft state: reports and routers rebuild it. Under
`inflight:{pool}:` there are, with the records as JSON and times in milliseconds of Redis' clock:

| key | type | content |
| --- | --- | --- |
| `executors` | hash | executor → generation, seq, budget_blocks, total_blocks, budget_sequences, reserved_blocks, reserved_sequences, accepting, suspended (until its next report), last_report_ms, audited_ms, audit_due |
| `room` | zset | executor that may board → −available blocks; one fallen silent may linger |
| `sizes` | zset | executor → total blocks |
| `reports` | zset | executor → time of its last report |
| `requests` | hash | request → owner, state, class, deadline_ms, arrival, blocks, sequences, attempt, rejections; executor_id, generation, placed_ms of the latest placement |
| `waiting:1` `waiting:2` `waiting:3` | zset | line of a class: `arrival:request` → deadline; equal deadlines go by arrival |
| `waiting_by_owner` | zset | `router\\0request` of all that wait, to find a dead router's |
| `placements` | zset | `executor\\0attempt\\0request` of all that are placed, to find an executor's |
| `lost` | zset | request taken back from an executor → when; its owner was told |
| `ended` | zset | request ended lately → when: a late report must not bring it back |
| `routers` | zset | router → end of its lease; 0 while it is being reaped |
| `arrivals` | string | counts arrivals, and so orders them |
| `attended` | hash | last_ms, since_ms: since when `reap` has been called without a gap |
| `mailbox:<router>` | stream | what the router must know of its requests, about 10,000 entries |
"""  # noqa: E501 - rows of a table do not wrap

from __future__ import annotations

from dataclasses import dataclass

POOL_KEYS = (
    "executors",
    "room",
    "sizes",
    "reports",
    "requests",
    "waiting:1",
    "waiting:2",
    "waiting:3",
    "waiting_by_owner",
    "placements",
    "lost",
    "ended",
    "routers",
    "arrivals",
    "attended",
)
"""The order of KEYS in every script; `prelude.lua` names them in the same order."""

NUM_CLASSES = 3


@dataclass(frozen=True, slots=True)
class PoolKeys:
    """The key names of one pool."""

    pool: str

    def __post_init__(self) -> None:
        if not self.pool or "{" in self.pool or "}" in self.pool:
            raise ValueError(f"a pool's name is not empty and has no braces: {self.pool!r}")

    def key(self, name: str) -> str:
        """The key called `name` in the map above."""
        return f"inflight:{{{self.pool}}}:{name}"

    def mailbox(self, router_id: str) -> str:
        """The router's mailbox."""
        return self.key(f"mailbox:{router_id}")

    def for_script(self, router_ids: tuple[str, ...]) -> list[str]:
        """KEYS of a script call that may write to these routers' mailboxes."""
        return [self.key(name) for name in POOL_KEYS] + [self.mailbox(router_id) for router_id in router_ids]
