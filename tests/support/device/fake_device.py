"""A device for tests of the scheduler: KV blocks as a dictionary and a model that is a hash.

The content of a position depends on the salt and on every token up to it, as real KV does, and is computed from the
content of the position before it, read through the block table. A block that is shared wrongly, overwritten or read
before it is written therefore shows, at the latest as a wrong token.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as ReadOnlyList

from inflight.executor.engine.runner import PendingStep
from inflight.executor.scheduler.blocks import BlockPool, WindowPool
from inflight.executor.scheduler.prefix_cache import chain_hashes
from inflight.executor.scheduler.sequence import (
    NO_LOGPROBS,
    FinishReason,
    PlanRow,
    Sampling,
    Sequence,
    StepPlan,
    Stopping,
    TokenLogprobs,
    accepted_ids,
)

VOCABULARY_SIZE = 5
# More drafts than any sequence verifies in a step.
MAX_DRAFTS = 7


def root_content(sequence: Sequence) -> int:
    """What stands before the first position. Without a salt it is the sequence's own."""
    salt = sequence.cache_salt
    name = f"{sequence.request_id}/{sequence.attempt}".encode() if salt is None else b"salt:" + salt
    return int.from_bytes(name, "little")


def next_content(previous: int, token_id: int) -> int:
    """The content of a position, from the one before and the position's token."""
    return hash((previous, token_id))


def sampled_id(content: int, sampling: Sampling) -> int:
    """The token that follows a position with this content. The seed counts unless the request is greedy."""
    return (hash((content, sampling.seed)) if sampling.temperature else content) % VOCABULARY_SIZE


def token_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """What is reported of a token: that it was the likeliest, before the ids that follow it."""
    top_ids = tuple((token_id + i) % VOCABULARY_SIZE for i in range(num_top))
    return TokenLogprobs(-token_id / 8, top_ids, tuple(-(token_id + i) / 8 for i in range(num_top)), rank=1)


def logprobs_of(plan: StepPlan, sampled_ids: tuple[int | None, ...]) -> dict[int, TokenLogprobs]:
    """What the step reports."""
    sampling = [row.sequence for row in plan.rows if row.samples for _ in range(1 + len(row.drafts))]
    logprobs = {
        row: token_logprobs(token_id, sequence.num_top_logprobs)
        for row, (sequence, token_id) in enumerate(zip(sampling, sampled_ids, strict=True))
        if sequence.num_top_logprobs is not None and token_id is not None
    }
    scored = [(one.sequence, token_id) for one in plan.scored for token_id in one.target_ids]
    for row, (sequence, token_id) in enumerate(scored, start=len(sampling)):
        logprobs[row] = token_logprobs(token_id, sequence.num_prompt_logprobs or 0)
    return logprobs


class RunStep:
    """A step that is through."""

    allows_next = True
    copied_s = 0.0
    began_s = 0.0
    ended_s = 0.0

    def __init__(self, sampled_ids: tuple[int, ...], logprobs: Mapping[int, TokenLogprobs] = NO_LOGPROBS) -> None:
        self._sampled_ids = sampled_ids
        self._logprobs = logprobs

    def result(self) -> tuple[int, ...]:
        return self._sampled_ids

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        return self._logprobs


class FakeDevice:
    """Runs plans, and asserts that they read what they should and write only where they may."""

    def __init__(self, pool: BlockPool, windows: WindowPool | None = None, num_window_tokens: int = 0) -> None:
        self._pool = pool
        self._windows = windows
        self._num_window_tokens = num_window_tokens
        self._contents: dict[tuple[int, int], int] = {}
        # Those of the layers with a sliding window, which have a pool of their own.
        self._window_contents: dict[tuple[int, int], int] = {}
        # The contents of the last positions of each slot of recurrent state, by position, and those of checkpoints.
        self._state_contents: dict[int, dict[int, int]] = {}
        self._checkpoints: dict[int, tuple[int, int]] = {}
        self._host_states: dict[int, dict[int, int]] = {}
        self._host_contents: dict[tuple[int, int], int] = {}
        self._sampled: dict[tuple[Sequence, int], int] = {}
        self._newest: dict[Sequence, int] = {}
        self._lost: set[Sequence] = set()

    def launch(self, plan: StepPlan) -> PendingStep:
        """See `StepRunner`. The device is infinitely fast."""
        sampled_ids = self.run(plan)
        return RunStep(sampled_ids, logprobs_of(plan, sampled_ids))

    def close(self) -> None:
        """See `StepRunner`."""

    def run(self, plan: StepPlan) -> tuple[int, ...]:
        """Returns the sampled token ids of the rows that sample, in the order of the plan's rows, those with drafts
        with one for each of their positions."""
        self._swap(plan)
        self._load_states(plan)
        for row in plan.rows:
            self._write(row)
        self._save_states(plan)
        self._newest = {}
        sampled_ids: list[int] = []
        for row in plan.rows:
            if row.samples:
                sampled_ids += self._sample(row)
        return tuple(sampled_ids)

    def host_content(self, host_block: int) -> list[int]:
        """The content of a host block, as far as it was written."""
        places = ((host_block, offset) for offset in range(self._pool.block_size))
        return [self._host_contents[place] for place in places if place in self._host_contents]

    def _sample(self, row: PlanRow) -> list[int]:
        first = row.start + row.num_tokens - len(row.drafts)
        contents = self._read(row)[first - 1 :]
        sampled_ids = [sampled_id(content, row.sequence.sampling) for content in contents]
        for position, token_id in enumerate(accepted_ids(row.drafts, sampled_ids), start=first):
            assert token_id is not None
            self._sampled[row.sequence, position] = token_id
        if not row.drafts:
            self._newest[row.sequence] = sampled_ids[0]
        return sampled_ids

    def corrupt(self, plan: StepPlan) -> None:
        """Runs a step that fails: what it leaves where it writes is garbage, and so is what comes after it."""
        self._swap(plan)
        written = {sequence.state_slot for sequence in plan.touched}
        self._state_contents = {slot: kept for slot, kept in self._state_contents.items() if slot not in written}
        self._checkpoints.update({save.checkpoint: (0, 0) for save in plan.state_saves})
        self._lost.update(plan.sequences, plan.swapped)
        for _, host_block in plan.swaps_out:
            self._host_contents.update({(host_block, i): 0 for i in range(self._pool.block_size)})
        for row in plan.rows:
            for position in range(row.start, row.start + row.num_tokens):
                self._contents[self._place(row.sequence, position)] = 0
                if self._windows is not None:
                    self._window_contents[self._window_place(row.sequence, position)] = 0
        self._newest = {}

    def _load_states(self, plan: StepPlan) -> None:
        for checkpoint, slot, position in plan.state_loads:
            saved, content = self._checkpoints[checkpoint]
            assert saved == position, "a checkpoint of another position is loaded"
            self._state_contents[slot] = {position - 1: content}

    def _save_states(self, plan: StepPlan) -> None:
        for save in plan.state_saves:
            slot = save.sequence.state_slot
            assert slot is not None
            if save.sequence not in self._lost:
                content = self._state_contents[slot][save.position - 1]
                self._checkpoints[save.checkpoint] = save.position, content

    def _follow_state(self, row: PlanRow) -> None:
        """A row reads the state at its start, and keeps that of the positions that it computes and of those before that
        drafts may have reached."""
        slot, start = row.sequence.state_slot, row.start
        if slot is None or row.sequence in self._lost:
            return
        state = self._state_contents.setdefault(slot, {}) if start else {}
        assert not start or state[start - 1] == self._contents[self._place(row.sequence, start - 1)], "wrong state"
        self._state_contents[slot] = {
            position: content for position, content in state.items() if start - 1 - MAX_DRAFTS <= position < start
        }
        for position in range(start, start + row.num_tokens):
            self._state_contents[slot][position] = self._contents[self._place(row.sequence, position)]

    def _swap(self, plan: StepPlan) -> None:
        """All copies out, then all copies in."""
        assert len({block for _, block in plan.swaps_out}) == len(plan.swaps_out), "two copies to one host block"
        for block, host_block in plan.swaps_out:
            _copy(self._contents, block, self._host_contents, host_block, self._pool.block_size)
        for host_block, block in plan.swaps_in:
            assert not self._pool.is_published(block), f"block {block} is written but published"
            _copy(self._host_contents, host_block, self._contents, block, self._pool.block_size)
        for slot, host_slot in plan.state_swaps_out:
            self._host_states[host_slot] = dict(self._state_contents.get(slot, {}))
        for host_slot, slot in plan.state_swaps_in:
            self._state_contents[slot] = dict(self._host_states[host_slot])

    def _write(self, row: PlanRow) -> None:
        sequence = row.sequence
        content = root_content(sequence)
        if row.start > 0:
            content = self._contents[self._place(sequence, row.start - 1)]
        for position in range(row.start, row.start + row.num_tokens):
            block, offset = self._place(sequence, position)
            assert block != 0, "the spare block is in a block table"
            assert self._pool.num_references(block) == 1, f"block {block} is written but shared"
            assert not self._pool.is_published(block), f"block {block} is written but published"
            content = next_content(content, self._input_id(row, position))
            self._contents[block, offset] = content
            if self._windows is not None:
                place = self._window_place(sequence, position)
                assert self._windows.is_writable(place[0]), f"window block {place[0]} is written but shared"
                self._window_contents[place] = content
        self._follow_state(row)

    def _read(self, row: PlanRow) -> list[int]:
        """The content of each position up to the row's last one."""
        content = root_content(row.sequence)
        num_positions = row.start + row.num_tokens
        if row.sequence in self._lost:
            return [content] * num_positions
        contents = []
        for position in range(num_positions):
            draft = position - (num_positions - len(row.drafts))
            token_id = row.drafts[draft] if draft >= 0 else self._token_id(row.sequence, position)
            content = next_content(content, token_id)
            assert self._contents[self._place(row.sequence, position)] == content, f"wrong KV at position {position}"
            if self._windows is not None and position > row.start - self._num_window_tokens:
                window_content = self._window_contents[self._window_place(row.sequence, position)]
                assert window_content == content, f"wrong window KV at position {position}"
            contents.append(content)
        return contents

    def _input_id(self, row: PlanRow, position: int) -> int:
        """A carried token must be one that the step just before has sampled, any other is known on the host."""
        draft = position - (row.start + row.num_tokens - len(row.drafts))
        if draft >= 0:
            return row.drafts[draft]
        if not row.carries:
            return row.sequence.token_ids[position]
        assert row.num_tokens == 1
        return 0 if row.sequence in self._lost else self._newest[row.sequence]

    def _token_id(self, sequence: Sequence, position: int) -> int:
        """What the host knows, or has still to read, or dropped because the sequence had been cancelled."""
        if position < len(sequence.token_ids):
            return sequence.token_ids[position]
        return self._sampled[sequence, position]

    def _window_place(self, sequence: Sequence, position: int) -> tuple[int, int]:
        table = sequence.window_table
        assert table is not None, "a sequence has no window table"
        index, offset = divmod(position, self._pool.block_size)
        assert index >= table.first, f"position {position} has left the window"
        return table.blocks[index - table.first], offset

    def _place(self, sequence: Sequence, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self._pool.block_size)
        return sequence.block_table[index], offset


def _copy(
    source: dict[tuple[int, int], int], block: int, target: dict[tuple[int, int], int], copy: int, block_size: int
) -> None:
    """What was never written is not there afterwards either."""
    for offset in range(block_size):
        content = source.get((block, offset))
        if content is None:
            target.pop((copy, offset), None)
        else:
            target[copy, offset] = content


def block_contents(sequence: Sequence, output: ReadOnlyList[int], block_size: int) -> dict[bytes, list[int]]:
    """What is in each full block of the sequence once it has this output, by the block's hash."""
    if sequence.cache_salt is None:
        return {}
    token_ids = [*sequence.token_ids[: sequence.num_prompt_tokens], *output]
    contents = [root_content(sequence)]
    for token_id in token_ids:
        contents.append(next_content(contents[-1], token_id))
    hashes = chain_hashes(token_ids, block_size, sequence.cache_salt)
    firsts = range(1, len(contents), block_size)
    return {block_hash: contents[first : first + block_size] for block_hash, first in zip(hashes, firsts, strict=False)}


def solo_output(sequence: Sequence, context_length: int) -> tuple[list[int], FinishReason]:
    """What the sequence brings when it runs alone from here, and why it ends."""
    token_ids = list(sequence.token_ids)
    content = root_content(sequence)
    for token_id in token_ids:
        content = next_content(content, token_id)
    while True:
        token_ids.append(sampled_id(content, sequence.sampling))
        content = next_content(content, token_ids[-1])
        output = token_ids[sequence.num_prompt_tokens :]
        reason = _end_reason(output, sequence.stopping)
        if reason is None and len(token_ids) == context_length:
            reason = FinishReason.LENGTH
        if reason is not None:
            return output, reason


def _end_reason(output: ReadOnlyList[int], stopping: Stopping) -> FinishReason | None:
    if output[-1] in stopping.stop_token_ids and len(output) > stopping.min_tokens:
        return FinishReason.STOP_TOKEN
    return FinishReason.LENGTH if len(output) == stopping.max_tokens else None
