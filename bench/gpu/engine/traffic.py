"""Launches of a step of decodes and the memory that each touches, counted on the runner's own launches without a GPU.

The runner packs a real plan and launches its step on tensors of the CPU. Matrix products are counted by their shapes
and not computed. A Triton kernel runs in Triton's interpreter, which sees each address that it loads or stores; the
count is of 32-byte sectors, each once per launch, which is what has to come from memory if the cache loses nothing
within a launch. Programs that differ only in the first axis of the grid, the rows of the step, are alike: two of them
run, and the sectors of the second that are new are counted for every further one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

from inflight.bench.gpu.engine.launches import FP8_PRODUCT, PRODUCT, Launch
from inflight.bench.gpu.engine.session import Sizes
from inflight.bench.gpu.engine.steps import seated
from inflight.executor.attention.backend import KvShape
from inflight.executor.attention.triton import TritonAttention
from inflight.executor.checkpoint.decoder_weights import DecoderShape, DecoderWeights, LayerWeights, Rope
from inflight.executor.gpu.decoder import GpuDecoder
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.scheduler.limits import Batching, SchedulerLimits
from inflight.executor.scheduler.sequence import PlanRow, StepPlan

BLOCK_SIZE = 16
CONTEXT_LENGTH = 8192
SECTOR_BYTES = 32
# The interpreter multiplies no bfloat16; float16 has the same size.
DTYPE = torch.float16
# Prepares the block tables that the other kernels read.
RUN_WHOLE = "follow_tables_kernel"
PRODUCTS = ("aten::linear", "aten::mm", "aten::mm.out", "aten::addmm", "aten::_scaled_mm")
# None of these launches a kernel on a GPU.
FREE = (
    "empty",
    "empty_like",
    "view",
    "slice",
    "select",
    "t",
    "as_strided",
    "alias",
    "detach",
    "split",
    "unsqueeze",
    "flatten",
)


def decode_launches(sizes: Sizes, num_sequences: int, context: int, *, is_fp8: bool = False) -> Counter[Launch]:
    """Returns the launches of a step of decodes with how often each occurs. With `is_fp8` the weights of layers, keys
    and values are in FP8.

    A model of one layer and one of two are counted; every further layer is like the second.
    """
    counter = LaunchCounter()
    one, two = (
        _launches(counter, replace(sizes, num_layers=layers), num_sequences, context, is_fp8) for layers in (1, 2)
    )
    each = two - one
    return one + Counter({launch: count * (sizes.num_layers - 1) for launch, count in each.items()})


def _launches(counter: LaunchCounter, sizes: Sizes, num_sequences: int, context: int, is_fp8: bool) -> Counter[Launch]:
    backend = TritonAttention()
    limits = SchedulerLimits(
        max_num_sequences=num_sequences,
        num_standby_sequences=0,
        max_num_tokens=max(16, num_sequences),
        context_length=CONTEXT_LENGTH,
        enable_chunked_context=True,
        batching=Batching.INFLIGHT,
        enable_prefix_cache=False,
    )
    num_blocks = num_sequences * -(-context // BLOCK_SIZE)
    shape = KvShape(sizes.num_kv_heads, sizes.head_dim)
    kv_dtype = torch.float8_e4m3fn if is_fp8 else DTYPE
    kv = backend.allocate(shape, num_blocks + 1, BLOCK_SIZE, kv_dtype, torch.device("cpu"))
    decoder = GpuDecoder(_weights(sizes), backend, CONTEXT_LENGTH, has_fp8_weights=is_fp8)
    runner = GpuRunner(decoder, [kv] * sizes.num_layers, limits, BLOCK_SIZE, uses_graphs=False)
    sequences = seated(num_sequences, context, 1, BLOCK_SIZE)
    plan = StepPlan.of([PlanRow(sequence, context - 1, 1, True) for sequence in sequences])
    with counter.attached():
        runner.launch(replace(plan, boarded=tuple(sequences)))
        # What the graph of the bucket contains, without the upload.
        counter.launches.clear()
        runner.repeat_decodes(num_sequences)
    runner.close()
    return counter.launches.copy()


def _weights(sizes: Sizes) -> DecoderWeights:
    """Returns zeros. They are never written, so they take no memory."""
    hidden, head_dim = sizes.hidden_size, sizes.head_dim

    def linear(size: int) -> nn.Linear:
        made = nn.Linear(1, 1, bias=False)
        made.weight = nn.Parameter(zeros(size * head_dim, hidden), requires_grad=False)
        return made

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=DTYPE)

    def layer() -> LayerWeights:
        return LayerWeights(
            input_norm=zeros(hidden),
            qkv_parts=(linear(sizes.num_heads), linear(sizes.num_kv_heads), linear(sizes.num_kv_heads)),
            query_norm=None,
            key_norm=None,
            output=zeros(hidden, sizes.num_heads * head_dim),
            output_bias=None,
            attention_output_norm=None,
            post_attention_norm=zeros(hidden),
            gate_up_parts=(zeros(sizes.intermediate_size, hidden), zeros(sizes.intermediate_size, hidden)),
            down=zeros(hidden, sizes.intermediate_size),
            feed_forward_output_norm=None,
        )

    shape = DecoderShape(
        num_layers=sizes.num_layers,
        hidden_size=hidden,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=head_dim,
        intermediate_size=sizes.intermediate_size,
        vocabulary_size=sizes.vocabulary_size,
        norm_epsilon=1e-5,
        attention_scale=head_dim**-0.5,
        sliding_windows=(None,) * sizes.num_layers,
        ropes=(Rope((0.0,) * (head_dim // 2), 1.0),),
        layer_ropes=(0,) * sizes.num_layers,
    )
    embedding = zeros(sizes.vocabulary_size, hidden)
    head = embedding if sizes.has_tied_embeddings else zeros(sizes.vocabulary_size, hidden)
    return DecoderWeights(shape, embedding, tuple(layer() for _ in range(sizes.num_layers)), zeros(hidden), head)


class LaunchCounter(TorchDispatchMode):
    """Counts what would be launched on a GPU. Products yield zeros."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: Counter[Launch] = Counter()
        self._sectors: dict[str, list[Any]] = {"load": [], "store": []}
        self._known: dict[str, Launch] = {}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Counts launches of Triton kernels and of torch."""
        run, load = InterpretedFunction.run, InterpreterBuilder.create_masked_load
        store = InterpreterBuilder.create_masked_store

        def counted_run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            if kernel.__name__ == RUN_WHOLE:
                run(kernel, *args, grid=grid, warmup=warmup, **options)
                return
            sizes = [arg if isinstance(arg, int) else getattr(arg, "shape", None) for arg in args]
            key = f"{kernel.__name__} {grid} {sizes} {sorted(options.items())}"
            if key not in self._known:
                with torch.utils._python_dispatch._disable_current_modes():
                    counts = [
                        self._count(partial(run, kernel, *args, grid=part, warmup=warmup, **options))
                        for part in ((min(rows, grid[0]), *grid[1:]) for rows in (1, 2))
                    ]
                loaded, stored = (
                    SECTOR_BYTES * (first + (second - first) * max(1, grid[0] - 1))
                    for first, second in zip(*counts, strict=True)
                )
                self._known[key] = Launch(kernel.__name__, prod(grid), loaded, stored, 0)
            self.launches[self._known[key]] += 1

        def counted_load(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            self._touch("load", pointers.data, mask.data)
            return load(builder, pointers, mask, *rest)

        def counted_store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._touch("store", pointers.data, mask.data)
            return store(builder, pointers, value, mask, *rest)

        InterpretedFunction.run = counted_run
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = counted_load, counted_store
        try:
            with self:
                yield
        finally:
            InterpretedFunction.run = run
            InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name()
        if name in PRODUCTS:
            return self._product(name, args, kwargs)
        result = func(*args, **kwargs)
        if func.overloadpacket.__name__ not in FREE and isinstance(result, Tensor):
            # An index reads as many rows as it writes.
            self.launches[Launch(name, 1, result.nbytes, result.nbytes, 0)] += 1
        return result

    def _product(self, name: str, args: Any, kwargs: Any) -> Tensor:
        rows, weight = args[-2:] if name == "aten::addmm" else args[:2]
        num_outputs = weight.shape[0] if name == "aten::linear" else weight.shape[1]
        result: Tensor | None = kwargs.get("out")
        if result is None:
            result = torch.zeros((rows.shape[0], num_outputs), dtype=DTYPE)
        operations = 2 * rows.shape[0] * rows.shape[1] * num_outputs
        is_fp8 = name == "aten::_scaled_mm"
        loaded = sum(tensor.nbytes for tensor in (rows, weight, *(args[2:4] if is_fp8 else ())))
        self.launches[Launch(FP8_PRODUCT if is_fp8 else PRODUCT, 1, loaded, result.nbytes, operations)] += 1
        return result

    def _count(self, run: Any) -> tuple[int, int]:
        self._sectors = {"load": [], "store": []}
        # Products yield zeros and a part of the grid runs, so kernels compute with memory that holds anything.
        with np.errstate(all="ignore"):
            run()
        loaded, stored = (
            len(np.unique(np.concatenate(sectors))) if sectors else 0 for sectors in self._sectors.values()
        )
        return loaded, stored

    def _touch(self, way: str, addresses: Any, mask: Any) -> None:
        touched = np.atleast_1d(addresses)[np.atleast_1d(mask).astype(bool)]
        self._sectors[way].append(np.unique(touched // SECTOR_BYTES))
