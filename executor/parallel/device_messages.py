"""The contents of messages from the leader of a GPU forward pass to the workers."""

from __future__ import annotations

import json

import numpy as np

from inflight.executor.engine.runner import StepSizes
from inflight.executor.gpu.device_step import StepForm
from inflight.executor.gpu.graphs import Bucket
from inflight.executor.gpu.runner import FollowedStep
from inflight.executor.gpu.step_layout import StepLayout, Words
from inflight.executor.scheduler.limits import Batching, SchedulerLimits

NUM_UPLOAD_SIZES = 2


# The limits that runners are made with, which must be those of the leader's. Only the leader schedules.
LIMITS_OF_RUNNERS = ("max_num_sequences", "max_num_tokens", "context_length", "enable_chunked_context", "max_drafts")


def pack_sizes(sizes: StepSizes) -> bytes:
    """Returns the sizes of runners as a message."""
    content = {
        **{name: getattr(sizes.limits, name) for name in LIMITS_OF_RUNNERS},
        "block_size": sizes.block_size,
        "uses_graphs": sizes.uses_graphs,
        "max_graph_tokens": sizes.max_graph_tokens,
    }
    return json.dumps(content).encode()


def unpack_sizes(content: bytes) -> StepSizes:
    """Returns the sizes of a message."""
    values = json.loads(content)
    limits = SchedulerLimits(
        **{name: values.pop(name) for name in LIMITS_OF_RUNNERS},
        num_standby_sequences=0,
        batching=Batching.INFLIGHT,
        enable_prefix_cache=False,
    )
    return StepSizes(limits, **values)


def pack_upload(words: Words, first: int, count: int) -> bytes:
    """Returns the arguments of `GpuRunner.receive` as a message."""
    return np.array([first, count], np.int64).tobytes() + words.tobytes()


def unpack_upload(content: bytes) -> tuple[Words, int, int]:
    """Returns the arguments of `GpuRunner.receive`."""
    first, count = np.frombuffer(content, np.int64, NUM_UPLOAD_SIZES).tolist()
    return np.frombuffer(content, np.int32, offset=8 * NUM_UPLOAD_SIZES), first, count


def pack_launch(step: FollowedStep) -> bytes:
    """Returns a step as a message."""
    form, layout = step.form, step.form.layout
    bucket = form.bucket
    sizes = [
        *(layout.num_tokens, layout.num_sequences, layout.num_logits),
        *(layout.num_scored, layout.num_adapters, layout.is_padded),
        *(form.num_decodes, step.num_rows, step.needs_logits, step.changes_ids),
        *(() if bucket is None else (bucket.num_tokens, bucket.num_sequences, bucket.is_decodes)),
    ]
    return np.array(sizes, np.int64).tobytes()


def unpack_launch(content: bytes) -> FollowedStep:
    """Returns the step of a message."""
    sizes: list[int] = np.frombuffer(content, np.int64).tolist()
    num_tokens, num_sequences, num_logits, num_scored, num_adapters, is_padded, *others = sizes
    layout = StepLayout(num_tokens, num_sequences, num_logits, num_scored, num_adapters, bool(is_padded))
    num_decodes, num_rows, needs_logits, changes_ids, *of_bucket = others
    bucket = Bucket(of_bucket[0], of_bucket[1], bool(of_bucket[2])) if of_bucket else None
    return FollowedStep(StepForm(layout, num_decodes, bucket), num_rows, bool(needs_logits), bool(changes_ids))
