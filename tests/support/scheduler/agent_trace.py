"""Traffic of agents, a sixteenth of its real length, and what caches make of it.

A session has a system message with tools that it shares with others, a long first message, and turns that append tool
results of 32 to 256 tokens (0.5 to 4 thousand in reality). It forks into subagents that go on from its whole
conversation, or starts ones that share only the system message. Some sessions drop the thinking of earlier turns when
the user writes again, and some turns are asked again in other words. Some sessions are active at a time, and which of
them is next is random.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.limits import StateLimits
from inflight.executor.scheduler.prefix_cache import chain_hashes
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import Sampling, StepResult, Stopping
from inflight.executor.scheduler.sequence import Sequence as ScheduledSequence
from tests.support.scheduler.scheduling import make_limits

END = 1
FIRST_WORD, NUM_WORDS = 10, 50_000
BLOCK_SIZE, GRID = 16, 64
CONTEXT_LENGTH = 20_000
NUM_SYSTEMS, NUM_ACTIVE = 3, 6


@dataclass(frozen=True, slots=True)
class Call:
    """A request and what the model answers."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(slots=True)
class _Session:
    """A conversation. Messages of it are thinking, or stay."""

    messages: list[tuple[int, ...]]
    num_turns: int
    may_fork: bool = False
    drops_thinking: bool = False
    thinking: set[int] = field(default_factory=set)

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(token for message in self.messages for token in message)


class AgentTrace:
    """The calls of so many sessions, without those of the subagents."""

    def __init__(self, seed: int, num_sessions: int) -> None:
        self._rng = random.Random(seed)
        self._systems = [self._message(500, 1000) for _ in range(NUM_SYSTEMS)]
        self._num_left = num_sessions

    def calls(self) -> Iterator[Call]:
        """Returns the calls in their order."""
        active: list[_Session] = []
        while self._num_left or active:
            while self._num_left and len(active) < NUM_ACTIVE:
                self._num_left -= 1
                active.append(self._new_session())
            session = self._rng.choice(active)
            yield from self._turn(session, active)
            if not session.num_turns:
                active.remove(session)

    def _turn(self, session: _Session, active: list[_Session]) -> Iterator[Call]:
        rng = self._rng
        session.num_turns -= 1
        if rng.random() < 0.05:  # asked again in other words
            yield Call(session.prompt, self._words(4, 30))
            session.messages[-1] = self._message(32, 256)
        thought, answer = self._words(8, 60), self._message(4, 30)
        yield Call(session.prompt, thought + answer)
        session.thinking.add(len(session.messages))
        session.messages += [thought, answer]
        if session.may_fork and rng.random() < 0.15:
            for _ in range(rng.randint(2, 3)):
                active.append(_Session([*session.messages, self._message(32, 128)], rng.randint(2, 5)))
        elif session.may_fork and rng.random() < 0.1:
            active.append(_Session([session.messages[0], self._message(100, 400)], rng.randint(2, 6)))
        if session.drops_thinking and rng.random() < 0.15:  # the user writes again
            kept = (message for i, message in enumerate(session.messages) if i not in session.thinking)
            session.messages, session.thinking = list(kept), set()
        session.messages.append(self._message(32, 256))

    def _new_session(self) -> _Session:
        rng = self._rng
        messages = [rng.choice(self._systems), self._message(800, 3000)]
        return _Session(messages, rng.randint(6, 20), may_fork=True, drops_thinking=rng.random() < 0.3)

    def _words(self, least: int, most: int) -> tuple[int, ...]:
        rng = self._rng
        return tuple(FIRST_WORD + rng.randrange(NUM_WORDS) for _ in range(rng.randint(least, most)))

    def _message(self, least: int, most: int) -> tuple[int, ...]:
        return (*self._words(least, most), END)


@dataclass(slots=True)
class HybridCache:
    """A scheduler whose model has recurrent layers. `calls` says what it does with calls one after the other."""

    num_blocks: int
    num_checkpoints: int
    knows_ends: bool = True
    num_calls: int = 0
    scheduler: Scheduler = field(init=False)

    def __post_init__(self) -> None:
        ends = frozenset({END}) if self.knows_ends else frozenset()
        limits = make_limits(
            max_num_sequences=8,
            num_standby_sequences=8,
            max_num_tokens=4096,
            context_length=CONTEXT_LENGTH,
            states=StateLimits(9, self.num_checkpoints, GRID, ends),
        )
        self.scheduler = Scheduler(limits, BlockPool(self.num_blocks, BLOCK_SIZE))

    def hits(self, calls: Sequence[Call]) -> list[int]:
        """Returns how many tokens of each prompt are found."""
        return [self.run(call).num_cached_tokens for call in calls]

    def run(self, call: Call) -> ScheduledSequence:
        """Runs a call to its end, on a device that samples what the call says."""
        num_tokens, max_tokens = len(call.prompt), len(call.output)
        num_blocks = -(-(num_tokens + max_tokens) // BLOCK_SIZE)
        stopping = Stopping(max_tokens, 0, frozenset())
        sampling = Sampling(0.0, 0, 1.0, 0)
        self.num_calls += 1
        name = f"r{self.num_calls}"
        request = ScheduledSequence(name, 1, list(call.prompt), num_tokens, sampling, stopping, num_blocks, b"")
        assert self.scheduler.offer(request) is None
        while not self.scheduler.is_idle:
            plan = self.scheduler.schedule()
            sampled = [call.output[row.output_index] for row in plan.rows if row.samples]
            self.scheduler.update(StepResult(plan, tuple(sampled)))
        return request


def ideal_hits(calls: Sequence[Call], num_blocks: int, num_checkpoints: int) -> list[int]:
    """Returns the same for a cache of the same memory that knows the future: it saves a state exactly where a later
    prompt will go on from it, and drops the block and the state whose next use is the farthest (Belady's choice, in
    each pool by itself)."""
    chains = [chain_hashes(call.prompt + call.output[:-1], BLOCK_SIZE, b"") for call in calls]
    found = [_longest_shared(chains, calls, number) for number in range(len(calls))]
    block_uses: dict[bytes, list[int]] = {}
    state_uses: dict[bytes, list[int]] = {}
    for number, num_shared in enumerate(found):
        for block_hash in chains[number][:num_shared]:
            block_uses.setdefault(block_hash, []).append(number)
        if num_shared:
            state_uses.setdefault(chains[number][num_shared - 1], []).append(number)
    blocks, states, hits = set[bytes](), set[bytes](), []
    stride = GRID // BLOCK_SIZE
    for number, call in enumerate(calls):
        chain = chains[number]
        num_here = next((i for i, one in enumerate(chain) if one not in blocks), len(chain))
        num_here = min(num_here, (len(call.prompt) - 1) // BLOCK_SIZE) // stride * stride
        hits.append(next((n for n in range(num_here, 0, -stride) if chain[n - 1] in states), 0) * BLOCK_SIZE)
        blocks = _soonest(blocks.union(chain), block_uses, number, num_blocks)
        states = _soonest(states.union(chain[stride - 1 :: stride]), state_uses, number, num_checkpoints)
    return hits


def _longest_shared(chains: list[list[bytes]], calls: Sequence[Call], number: int) -> int:
    """Returns the blocks of a prompt up to the last place of a checkpoint within what an earlier call computed."""
    stride = GRID // BLOCK_SIZE
    chain = chains[number][: (len(calls[number].prompt) - 1) // BLOCK_SIZE]
    num_shared = max((_num_common(chain, other) for other in chains[:number]), default=0)
    return num_shared // stride * stride


def _num_common(one: list[bytes], other: list[bytes]) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[middle - 1] == other[middle - 1] else (low, middle - 1)
    return low


def _soonest(held: set[bytes], uses: dict[bytes, list[int]], now: int, most: int) -> set[bytes]:
    """Returns those that are used again, at most so many, and of these the ones that are used soonest."""
    wanted = {one: use for one in held & uses.keys() for use in [_next(uses[one], now)] if use is not None}
    return set(sorted(wanted, key=lambda one: (wanted[one], one))[:most])


def _next(uses: list[int], now: int) -> int | None:
    index = bisect_right(uses, now)
    return uses[index] if index < len(uses) else None
