"""The Redis of a simulation: one connection, one pool, and a clock that the timeline sets.

A call takes effect when it is made; its reply comes one round trip later. While Redis is away calls fail; whether they
take effect all the same is drawn.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from inflight.bench.redis.pipelined import RedisWire
from inflight.bench.redis.wire import command
from inflight.bench.timeline.timeline import Timeline
from inflight.router.ledger.codec import Reply, parse_reply, parse_snapshot
from inflight.router.ledger.functions import load_scripts
from inflight.router.ledger.keys import PoolKeys
from inflight.router.ledger.types import Snapshot

STEERED_CLOCK = "local function now_ms() return tonumber(redis.call('GET', KEYS[1] .. ':clock')) end\n"
"""Takes the place of `clock.lua`: the time is what the simulation wrote."""

EMPTY = "for _, key in ipairs(redis.call('KEYS', ARGV[1])) do redis.call('DEL', key) end"

# The keys like ARGV[1] are copied to names that begin with ARGV[2], and later take the place of what is there then.
REMEMBER = """
for _, key in ipairs(redis.call('KEYS', ARGV[2] .. '*')) do redis.call('DEL', key) end
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do redis.call('COPY', key, ARGV[2] .. key) end
"""
RESTORE = """
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do redis.call('DEL', key) end
for _, key in ipairs(redis.call('KEYS', ARGV[2] .. '*')) do redis.call('RENAME', key, key:sub(#ARGV[2] + 1)) end
"""

OBSERVER_ID = "observer"
ROUND_TRIP_US = 300
# Redis' clock where the timeline's is 0: so late that it can be set back by hours, again and again.
EPOCH_MS = 10_000 * 3_600_000
# As `LedgerSettings.call_timeout_ms`.
TIMEOUT_US = 2_000_000

OnReply = Callable[[Any], None]


class StoreLink:
    """The way to the ledger, shared by all routers of a simulation."""

    def __init__(self, url: str, pool: str, timeline: Timeline, seed: int) -> None:
        self.url = url
        self.keys = PoolKeys(pool)
        self.timeline = timeline
        self.num_calls = 0
        self._random = random.Random(f"{seed}/store")
        self._away_until_us = 0
        self._readers: dict[str, Callable[[], None]] = {}
        self._clock_key = self.keys.key("executors:clock")
        self._clock_ms = -1
        self._behind_ms = 0
        # Calls whose reply's time has not come, and the replies of the first of them that were read all the same.
        self._due: deque[tuple[str, OnReply | None]] = deque()
        self._early: deque[Any] = deque()
        self._wire = RedisWire.connect(url, self._on_push)
        self.scripts = load_scripts(STEERED_CLOCK)
        self._wire.call(command("FUNCTION", "LOAD", "REPLACE", self.scripts.source))
        self._wire.call(command("CONFIG", "SET", "notify-keyspace-events", "Kt"))
        # Answered by a push, which the next read meets.
        self._wire.send(command("PSUBSCRIBE", f"__keyspace@0__:{self.keys.mailbox('*')}"))

    def close(self) -> None:
        """Reads what is still to come, removes the pool and ends the connection."""
        self.wait_for_calls()
        self._due.clear()
        self._wire.call(self._emptying())
        self._wire.close()

    def snapshot(self) -> Snapshot:
        """Reads the current state of the pool."""
        return parse_snapshot(self._observe("snapshot"))

    def now_ms(self) -> float:
        """Returns the ledger's time. It stands still where Redis' clock was set back."""
        return self._observe("verify").now_ms

    def query(self, *words: str | int) -> Any:
        """Returns the reply to a command that only reads, as the pool is now."""
        self.wait_for_calls()
        return self._wire.call(command(*words))

    def wait_for_calls(self) -> None:
        """Everything that was called has taken effect afterwards."""
        while len(self._early) < len(self._due):
            self._early.append(self._wire.read(self._due[len(self._early)][0]))

    def go_away(self, duration_us: int) -> None:
        """Makes Redis unreachable for a time."""
        self._away_until_us = max(self._away_until_us, self.timeline.now_us + duration_us)

    def empty(self) -> None:
        """Redis loses everything, as a restart without persistence does."""
        self._post("", self._emptying(), None)
        self._clock_ms = -1

    def remember(self, number: int) -> None:
        """Keeps what Redis holds now, to be brought back by `roll_back` with the same number."""
        self._post("", command("EVAL", REMEMBER, 0, self.keys.key("*"), f"stale:{number}:"), None)

    def roll_back(self, number: int) -> None:
        """Redis forgets what has changed since, as a failover to a replica that is behind does. No call fails."""
        self._post("", command("EVAL", RESTORE, 0, self.keys.key("*"), f"stale:{number}:"), None)
        self._clock_ms = -1

    def set_clock_back(self, step_ms: int) -> None:
        """Sets Redis' clock back permanently."""
        self._behind_ms += step_ms

    def listen(self, mailbox: str, reader: Callable[[], None]) -> None:
        """Has the reader called whenever something comes into the mailbox."""
        self._readers[mailbox] = reader

    def unlisten(self, mailbox: str) -> None:
        """Removes the mailbox's reader."""
        self._readers.pop(mailbox, None)

    def send(self, kind: str, payload: bytes, on_reply: OnReply | None, on_failure: Callable[[], None] | None) -> None:
        """Makes a call. Exactly one of the two is called later, if it is wanted."""
        if self._away_until_us > self.timeline.now_us:
            if on_failure is not None:
                self.timeline.after(TIMEOUT_US, on_failure)
            if self._random.random() < 0.5:
                return
            on_reply = None
        self._set_clock()
        self.num_calls += 1
        self._post(kind, payload, on_reply)

    def _observe(self, name: str) -> Reply:
        """Returns the reply of a script that changes nothing, as the pool is now."""
        self._set_clock()
        self.wait_for_calls()
        keys = self.keys.for_script(())
        call = ("FCALL", self.scripts.function(name), len(keys), *keys, OBSERVER_ID)
        return parse_reply(self._wire.call(command(*call)))

    def _set_clock(self) -> None:
        clock_ms = self.timeline.now_ms + EPOCH_MS - self._behind_ms
        if clock_ms != self._clock_ms:
            self._clock_ms = clock_ms
            self._post("", command("SET", self._clock_key, self._clock_ms), None)

    def _post(self, kind: str, payload: bytes, on_reply: OnReply | None) -> None:
        self._wire.send(payload)
        self._due.append((kind, on_reply))
        self.timeline.after(ROUND_TRIP_US, self._take)

    def _take(self) -> None:
        kind, on_reply = self._due.popleft()
        raw = self._early.popleft() if self._early else self._wire.read(kind)
        if on_reply is not None:
            on_reply(raw)

    def _emptying(self) -> bytes:
        return command("EVAL", EMPTY, 0, self.keys.key("*"))

    def _on_push(self, fields: list[Any]) -> None:
        if fields[0] == "pmessage":
            reader = self._readers.get(fields[2].partition("__:")[2])
            if reader is not None:
                reader()
