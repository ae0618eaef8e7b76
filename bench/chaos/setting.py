"""The model, the processes and the requests of a chaos run."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.chaos.options import ChaosOptions
from bench.chaos.requests import LengthRanges
from bench.fleet.tiny_model import write_tiny_model
from bench.targets.model import local_model
from common.model_source import resolve_model
from inflight.local.options import StackOptions

DTYPE = "float32"
TOKENS_PER_BLOCK = 16
# A step of the tiny model takes so long: an output of a hundred tokens, a second or two.
TINY_STEP_MS = 12
TINY_LENGTHS = LengthRanges(prompt=(8, 60), output=(20, 180))
LENGTHS = LengthRanges(prompt=(8, 120), output=(12, 72))
NUM_TINY_SAMPLES = 24
NUM_SAMPLES = 32


@dataclass(frozen=True, slots=True)
class Setting:
    """The processes, what the ledger calls their pool, and the requests. `system` names model and arithmetic."""

    stack: StackOptions
    pool: str
    system: str
    vocabulary_size: int
    lengths: LengthRanges
    num_samples: int


@contextmanager
def setting_of(options: ChaosOptions) -> Iterator[Setting]:
    """Opens the setting that the options ask for. The tiny model exists while it is open.

    Raises:
        ModelError: the model is not there or not whole.
    """
    with tempfile.TemporaryDirectory(prefix="inflight-chaos-") as folder:
        model = str(write_tiny_model(Path(folder))) if options.is_tiny else options.model
        source = resolve_model(model)
        lengths = TINY_LENGTHS if options.is_tiny else LENGTHS
        yield Setting(
            stack=_stack(options, model, lengths),
            pool=source.name,
            system=f"{source.name} ({source.revision}) in {DTYPE}",
            vocabulary_size=local_model(model).vocabulary_size,
            lengths=lengths,
            num_samples=NUM_TINY_SAMPLES if options.is_tiny else NUM_SAMPLES,
        )


def _stack(options: ChaosOptions, model: str, lengths: LengthRanges) -> StackOptions:
    inflight = (sys.executable, "-m", "inflight.cli.main")
    paced = (sys.executable, "-m", "bench.fleet.paced", str(TINY_STEP_MS))
    return StackOptions(
        executors=options.executors,
        routers=options.routers,
        model=model or None,
        run_dir=options.run_dir,
        program=paced if options.is_tiny else inflight,
        executor_args=(
            *("--dtype", DTYPE),
            *("--max-num-sequences", str(options.seats)),
            *("--max-tokens-in-paged-kv-cache", str(_num_kv_tokens(options.seats, lengths))),
            *options.executor_args,
        ),
    )


def _num_kv_tokens(seats: int, lengths: LengthRanges) -> int:
    """Room for the longest requests on all seats but one: some wait for blocks, some for a seat."""
    longest = lengths.prompt[1] + lengths.output[1] + TOKENS_PER_BLOCK
    return max(2, seats - 1) * -(-longest // TOKENS_PER_BLOCK) * TOKENS_PER_BLOCK
