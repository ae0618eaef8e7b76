"""The contents of messages from the leader of a GPU forward pass to the workers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

import numpy as np

from inflight.executor.gpu.device_step import StepForm
from inflight.executor.gpu.graphs import Bucket
from inflight.executor.gpu.runner import FollowedStep
from inflight.executor.gpu.step_layout import StepLayout, Words
from inflight.executor.scheduler.limits import Batching, SchedulerLimits

NUM_UPLOAD_SIZES = 2


@dataclass(frozen=True, slots=True)
class RunnerSizes:
    """The sizes that a runner is made with, which must be those of the leader's."""

    max_num_sequences: int
    max_num_tokens: int
    context_length: int
    enable_chunked_context: bool
    max_drafts: int
    block_size: int
    uses_graphs: bool
    max_graph_tokens: int

    @classmethod
    def of(cls, limits: SchedulerLimits, block_size: int, *, uses_graphs: bool, max_graph_tokens: int) -> Self:
        """Returns those of the leader's runner."""
        return cls(
            max_num_sequences=limits.max_num_sequences,
            max_num_tokens=limits.max_num_tokens,
            context_length=limits.context_length,
            enable_chunked_context=limits.enable_chunked_context,
            max_drafts=limits.max_drafts,
            block_size=block_size,
            uses_graphs=uses_graphs,
            max_graph_tokens=max_graph_tokens,
        )

    @property
    def limits(self) -> SchedulerLimits:
        """Limits with these sizes. Only the leader schedules."""
        return SchedulerLimits(
            max_num_sequences=self.max_num_sequences,
            num_standby_sequences=0,
            max_num_tokens=self.max_num_tokens,
            context_length=self.context_length,
            enable_chunked_context=self.enable_chunked_context,
            batching=Batching.INFLIGHT,
            enable_prefix_cache=False,
            max_drafts=self.max_drafts,
        )

    def pack(self) -> bytes:
        """Returns the content of a message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Reads the content of a message."""
        return cls(**json.loads(content))


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
