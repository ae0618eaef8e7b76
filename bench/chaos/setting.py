"""The model, the processes and the requests of a chaos run."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from inflight.bench.chaos.adapters import AdapterFiles
from inflight.bench.chaos.options import ChaosOptions
from inflight.bench.chaos.requests import LengthRanges
from inflight.bench.fleet.random_adapters import RANK
from inflight.bench.fleet.tiny_model import write_tiny_model
from inflight.bench.targets.model import local_model
from inflight.common.model_source import resolve_model
from inflight.local.options import StackOptions

DTYPE = "float32"
TOKENS_PER_BLOCK = 16
# A step of the tiny model takes so long: an output of a hundred tokens, a second or two.
TINY_STEP_MS = 12
TINY_LENGTHS = LengthRanges(prompt=(8, 60), output=(20, 180))
LENGTHS = LengthRanges(prompt=(8, 120), output=(12, 72))
NUM_TINY_SAMPLES = 24
NUM_SAMPLES = 32
# Of each version of each adapter. Their outputs are at most so long.
NUM_ADAPTER_SAMPLES = 4
MAX_ADAPTER_OUTPUT = 90


@dataclass(frozen=True, slots=True)
class Setting:
    """The processes, what the ledger calls their pool, and the requests. `system` names model and arithmetic. Without
    `adapters` there are none."""

    stack: StackOptions
    pool: str
    system: str
    vocabulary_size: int
    lengths: LengthRanges
    num_samples: int
    adapters: AdapterFiles | None

    @property
    def adapter_lengths(self) -> LengthRanges:
        """Of requests with an adapter."""
        least, most = self.lengths.output
        return LengthRanges(self.lengths.prompt, (least, min(most, MAX_ADAPTER_OUTPUT)))


@contextmanager
def setting_of(options: ChaosOptions) -> Iterator[Setting]:
    """Opens the setting that the options ask for. The tiny model exists while it is open.

    Raises:
        ModelError: the model is not there or not whole.
    """
    with tempfile.TemporaryDirectory(prefix="inflight-chaos-") as folder:
        model = str(write_tiny_model(Path(folder), name=options.model)) if options.is_tiny else options.model
        source = resolve_model(model)
        lengths = TINY_LENGTHS if options.is_tiny else LENGTHS
        local = local_model(model)
        adapters = None
        if options.adapters:
            adapters = AdapterFiles.write(Path(folder) / "adapters", local.folder, options.adapters)
        yield Setting(
            stack=_stack(options, model, lengths, adapters),
            pool=source.name,
            system=f"{source.name} ({source.revision}) in {DTYPE}",
            vocabulary_size=local.vocabulary_size,
            lengths=lengths,
            num_samples=NUM_TINY_SAMPLES if options.is_tiny else NUM_SAMPLES,
            adapters=adapters,
        )


def _stack(options: ChaosOptions, model: str, lengths: LengthRanges, adapters: AdapterFiles | None) -> StackOptions:
    inflight = (sys.executable, "-P", "-m", "inflight.cli.main")
    paced = (sys.executable, "-P", "-m", "inflight.bench.fleet.paced", str(TINY_STEP_MS))
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
            *(() if adapters is None else _adapter_args(options, adapters)),
            *options.executor_args,
        ),
    )


def _adapter_args(options: ChaosOptions, adapters: AdapterFiles) -> tuple[str, ...]:
    return (
        *("--adapter-folder", str(adapters.served)),
        *("--max-adapters", str(options.adapter_slots)),
        *("--max-adapter-rank", str(RANK)),
    )


def _num_kv_tokens(seats: int, lengths: LengthRanges) -> int:
    """Room for the longest requests on all seats but one: some wait for blocks, some for a seat."""
    longest = lengths.prompt[1] + lengths.output[1] + TOKENS_PER_BLOCK
    return max(2, seats - 1) * -(-longest // TOKENS_PER_BLOCK) * TOKENS_PER_BLOCK
