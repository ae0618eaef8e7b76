"""The cost of a claim, which a sub-pool's request with an id from its client makes: `python -m
inflight.bench.ledger.claims`.

A private Redis runs claims of new ids, one in a call and 4 and 16 in a call, as routers send them, and the script that
does nothing, in turns. It prints the processor time of Redis' main thread for each claim, medians over the rounds.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from inflight.bench.ledger.server import Server
from inflight.bench.redis.pipelined import RedisWire
from inflight.bench.redis.wire import command
from inflight.local.redis_server import PrivateRedis
from inflight.router.store.batches import MAX_ITEMS
from inflight.router.store.keys import FORMAT
from inflight.router.subpools.claims import CLAIM

NOTHING = "return 1"
NUM_ROUNDS = 15
NUM_CLAIMS = 4_000
KEPT_MS = 225_000


def main() -> None:
    """Measures and prints."""
    with (
        tempfile.TemporaryDirectory() as folder,
        PrivateRedis.start(Path(folder) / "redis.log") as redis,
    ):
        server, wire = Server(redis.admin_url), RedisWire.connect(redis.admin_url, lambda fields: None)
        costs: dict[tuple[str, int], list[float]] = {}
        for round_number in range(NUM_ROUNDS):
            for name, source in (("claim", CLAIM), ("nothing", NOTHING)):
                wire.call(command("SCRIPT", "LOAD", source))
                for num_together in (1, 4, MAX_ITEMS):
                    calls = _calls(source, f"{round_number}-{name}-{num_together}", num_together)
                    costs.setdefault((name, num_together), []).append(_cost_us(server, wire, calls))
        for (name, num_together), found in costs.items():
            print(f"{name}, {num_together} in a call: {statistics.median(found):.1f} µs, least {min(found):.1f}")
        wire.close()
        server.close()


def _calls(source: str, ids: str, num_together: int) -> list[bytes]:
    sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    keys = [f"inflight:{FORMAT}:{{model#0}}:claim:key-{ids}-{number:032x}" for number in range(NUM_CLAIMS)]
    return [
        command("EVALSHA", sha, num_together, *together, "host:50051:0123abcd", KEPT_MS, *([3, 1] * num_together))
        for together in (keys[start : start + num_together] for start in range(0, NUM_CLAIMS, num_together))
    ]


def _cost_us(server: Server, wire: RedisWire, calls: Sequence[bytes]) -> float:
    before_s = server.cpu_s()
    for call in calls:
        wire.call(call)
    return (server.cpu_s() - before_s) * 1e6 / NUM_CLAIMS


if __name__ == "__main__":
    main()
