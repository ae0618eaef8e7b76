"""Checks of the descriptions and frames that an executor sends.

Pure. A router applies no part of a frame that fails a check. The link then breaks and its requests continue elsewhere.
The streams of other executors are not affected. The checks cover values that could do harm: numbers that the ledger
computes with, numbers that are used as a key or an index, and lists that must have the same length.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sized
from types import MappingProxyType

from inflight.common.protocol import ADAPTER_HASH, MAX_FRAME_PROMPT_LOGPROBS, MAX_FRAME_TOKENS, MAX_TOP_LOGPROBS
from inflight.router.request.executor_context import FrameError
from inflight.router.request.validation import sampling_violations
from inflight.v1 import executor_pb2, types_pb2

# The ledger's scripts compute with doubles, which represent integers exactly up to this number.
MAX_COUNT = 2**53
# The ledger adds one to an attempt that it learns from a report, and the sum must fit into `Submit.attempt`.
MAX_ATTEMPT = 2**31
MAX_NAME_CHARACTERS = 512
MAX_TEXT_CHARACTERS = 4096
# A prompt token and an output token.
MIN_CONTEXT_LENGTH = 2
MAX_EOS_TOKEN_IDS = 4096
# More sequences than an executor holds. One call of a script audits a whole report.
MAX_HELD = 16_384
# Each report that reaches the ledger contains all adapters.
MAX_ADAPTERS = 4096
# Twice as many as executors name.
MAX_CHECKPOINT_NAMES = 1024
MAX_STATE_GRID_TOKENS = 1 << 16
# More accounts than an executor has, of two days.
MAX_ACCOUNTS = 16_384
# In the year 9999.
MAX_DAY = 2_932_896
# More rejections than an executor puts into one frame.
MAX_ANSWERS = 2**16
# More sequences than can board between two frames.
MAX_STARTED = 2**17

FINISH_REASONS = frozenset(types_pb2.FinishReason.values()) - {types_pb2.FINISH_REASON_UNSPECIFIED}

# By placement: what waits for an answer about it.
Placements = Mapping[tuple[str, int], Sized]
NO_PLACEMENTS: Placements = MappingProxyType({})


def check_description(description: executor_pb2.DescribeResponse) -> None:
    """Raises `FrameError` if the ledger cannot place requests with this description."""
    _check_name("executor_id", description.executor_id)
    for name in ("generation", "block_size", "total_blocks", "max_num_sequences", "vocabulary_size"):
        value = getattr(description, name)
        if not 0 < value <= MAX_COUNT:
            raise FrameError(f"{name} is {value}")
    grid_tokens = description.state_grid_tokens
    if grid_tokens % description.block_size or grid_tokens > MAX_STATE_GRID_TOKENS:
        raise FrameError(f"state_grid_tokens is {grid_tokens}, with blocks of {description.block_size} tokens")
    if description.context_length < MIN_CONTEXT_LENGTH:
        raise FrameError(f"context_length is {description.context_length}")
    outside = [token_id for token_id in description.eos_token_ids if token_id >= description.vocabulary_size]
    if outside or len(description.eos_token_ids) > MAX_EOS_TOKEN_IDS:
        raise FrameError(f"eos_token_ids has {len(description.eos_token_ids)} ids, of which {outside[:8]} are unknown")
    if description.executor_class:
        _check_name("executor_class", description.executor_class)
    for name in ("model", "model_revision", "backend", "dtype", "device", "kv_cache_dtype", "weight_dtype"):
        if len(getattr(description, name)) > MAX_TEXT_CHARACTERS:
            raise FrameError(f"{name} has {len(getattr(description, name))} characters")
    wrong = next(sampling_violations(description.default_sampling, description.vocabulary_size), None)
    if wrong is not None:
        raise FrameError(f"default_{wrong.field} {wrong.description}")


def check_frame(
    response: executor_pb2.ServeResponse,
    description: executor_pb2.DescribeResponse,
    offered: Placements,
    seated: Collection[int],
    asked: Placements = NO_PLACEMENTS,
) -> None:
    """Raises `FrameError` if a frame is not valid on this stream.

    `offered` are the submitted placements without an answer. `asked` are the placements whose attach has no answer yet.
    A placement can be offered or asked for several times before the first answer: this router has lost it to another
    one and got it back. The answers to those that it has withdrawn meanwhile are valid.
    `seated` are the slots that hold a sequence now.
    """
    if response.generation != description.generation:
        raise FrameError(f"its generation is {response.generation}, not {description.generation}")
    if len(response.rejected) > MAX_ANSWERS:
        raise FrameError(f"it rejects {len(response.rejected)} placements")
    slots = _slots_after(response.accepted, offered, seated)
    slots = _slots_after(response.attached, asked, slots)
    if response.HasField("step"):
        _check_step(response.step, slots, description.vocabulary_size)
    if response.HasField("report"):
        check_report(response.report, description)
    if response.HasField("usage"):
        _check_usage(response.usage)


def check_report(report: executor_pb2.Report, description: executor_pb2.DescribeResponse) -> None:
    """Raises `FrameError` if the ledger must not use the report."""
    if report.total_blocks != description.total_blocks:
        raise FrameError(f"total_blocks is {report.total_blocks}, in its description {description.total_blocks}")
    if report.budget_blocks > report.total_blocks:
        raise FrameError(f"budget_blocks is {report.budget_blocks} of {report.total_blocks}")
    most_sequences = description.max_num_sequences + description.num_standby_sequences
    if report.budget_sequences > most_sequences:
        raise FrameError(f"budget_sequences is {report.budget_sequences} of {most_sequences}")
    if report.saved_blocks > report.total_blocks * most_sequences:
        raise FrameError(f"saved_blocks is {report.saved_blocks}, of {most_sequences} sequences")
    if report.seq > MAX_COUNT:
        raise FrameError(f"seq is {report.seq}")
    if not 0 <= report.reserve_quantile <= 1:
        raise FrameError(f"reserve_quantile is {report.reserve_quantile}")
    for field, value in report.ListFields():
        if isinstance(value, float) and not 0 <= value < math.inf:
            raise FrameError(f"{field.name} is {value}")
    if len(report.checkpoint_names) > MAX_CHECKPOINT_NAMES:
        raise FrameError(f"it names {len(report.checkpoint_names)} checkpoints")
    _check_held(report)
    _check_adapters(report)


def _check_usage(usage: executor_pb2.UsageReport) -> None:
    if len(usage.accounts) > MAX_ACCOUNTS:
        raise FrameError(f"it reports the usage of {len(usage.accounts)} accounts")
    for one in usage.accounts:
        for field, value in one.used.ListFields():
            if value > MAX_COUNT:
                raise FrameError(f"{field.name} of an account is {value}")
        for name in (one.tenant, one.adapter_name):
            if name:
                _check_name("a name of an account", name)
        if one.day > MAX_DAY:
            raise FrameError(f"an account is of day {one.day}")


def _check_held(report: executor_pb2.Report) -> None:
    if len(report.held) > MAX_HELD:
        raise FrameError(f"it holds {len(report.held)} sequences")
    for held in report.held:
        _check_name("a held request_id", held.request_id)
        if not 0 < held.attempt <= MAX_ATTEMPT:
            raise FrameError(f"the attempt of the held {held.request_id[:100]} is {held.attempt}")
        if held.reserved_blocks > report.total_blocks:
            raise FrameError(f"{held.reserved_blocks} blocks of {report.total_blocks} are reserved for one sequence")
        if held.adapter_hash:
            _check_hash(held.adapter_hash)


def _check_adapters(report: executor_pb2.Report) -> None:
    if len(report.adapters) > MAX_ADAPTERS:
        raise FrameError(f"it serves {len(report.adapters)} adapters")
    for status in report.adapters:
        _check_name("the name of an adapter", status.name)
        _check_hash(status.hash)


def _check_hash(adapter_hash: str) -> None:
    if not ADAPTER_HASH.fullmatch(adapter_hash):
        raise FrameError(f"the hash of an adapter is {adapter_hash[:100]!r}")


def _slots_after(
    taken_in: Iterable[executor_pb2.SequenceAccepted | executor_pb2.SequenceAttached],
    expected: Placements,
    seated: Collection[int],
) -> Collection[int]:
    """Returns the slots that the rest of the frame may name. Raises `FrameError` if a sequence of `taken_in` was not
    expected or has a slot that is in use."""
    taken: set[int] = set()
    answered: Counter[tuple[str, int]] = Counter()
    for one in taken_in:
        placement = (one.request_id, one.attempt)
        answered[placement] += 1
        if answered[placement] > len(expected.get(placement, ())):
            raise FrameError("it takes what it was not offered")
        if len(one.slots) != 1:
            raise FrameError(f"it gives {len(one.slots)} slots to a sequence")
        if one.slots[0] in seated or one.slots[0] in taken:
            raise FrameError(f"slot {one.slots[0]} means another sequence")
        taken.add(one.slots[0])
    return taken.union(seated) if taken else seated


def _check_step(step: executor_pb2.StepFrame, slots: Collection[int], vocabulary_size: int) -> None:
    if not len(step.slots) == len(step.offsets) == len(step.token_ids):
        raise FrameError(f"it has {len(step.slots)} slots, {len(step.offsets)} offsets, {len(step.token_ids)} tokens")
    _check_step_counts(step, len(slots))
    if max(step.token_ids, default=0) >= vocabulary_size:
        raise FrameError(f"a token id is not below {vocabulary_size}")
    left = [*(one.slot for one in step.finished), *step.detached]
    if len(set(left)) != len(left):
        raise FrameError("a sequence leaves twice")
    for one in step.finished:
        if one.reason not in FINISH_REASONS:
            raise FrameError(f"a sequence ends for the reason {one.reason}")
        if one.pooled and not math.isfinite(sum(one.pooled)):
            raise FrameError("an embedding has numbers that are not finite")
    for reported in step.logprobs:
        _check_logprobs(reported.values, vocabulary_size)
    for scored in step.prompt_logprobs:
        for values in scored.values:
            _check_logprobs(values, vocabulary_size)
    named = {
        *(one.slot for one in step.logprobs),
        *(one.slot for one in step.prompt_logprobs),
        *step.slots,
        *step.paused,
        *left,
        *(one.slot for one in step.started),
    }
    unknown = [slot for slot in named if slot not in slots]
    if unknown:
        raise FrameError(f"slot {min(unknown)} holds no sequence")


def _check_step_counts(step: executor_pb2.StepFrame, num_slots: int) -> None:
    """Checks the lengths of the lists, before their entries are checked."""
    counts = {
        "tokens": (len(step.token_ids), MAX_FRAME_TOKENS),
        "log probabilities": (len(step.logprobs), len(step.token_ids)),
        "log probabilities of prompts": (
            sum(max(1, len(one.values)) for one in step.prompt_logprobs),
            MAX_FRAME_PROMPT_LOGPROBS,
        ),
        "starts": (len(step.started), MAX_STARTED),
        "pauses": (len(step.paused), num_slots),
        "ends": (len(step.finished) + len(step.detached), 2 * num_slots),
    }
    for name, (count, most) in counts.items():
        if count > most:
            raise FrameError(f"it has {count} {name}, and there can be {most}")


def _check_logprobs(values: types_pb2.PositionLogprobs, vocabulary_size: int) -> None:
    if len(values.top) > MAX_TOP_LOGPROBS:
        raise FrameError(f"{len(values.top)} tokens are the likeliest at one place")
    for one in (values.chosen, *values.top):
        if one.token_id >= vocabulary_size or not one.logprob <= 1e-3:
            raise FrameError(f"token {one.token_id} has the log probability {one.logprob}")


def _check_name(what: str, name: str) -> None:
    if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
        raise FrameError(f"{what} is not a name of 1 to {MAX_NAME_CHARACTERS} characters")
