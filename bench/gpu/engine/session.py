"""Measurements of one model on one GPU: one call for each that `make bench-gpu` asks for.

Each call raises `RuntimeError` where the GPU cannot do it, out of memory included; the session can be used on.
"""

from __future__ import annotations

import gc
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata

import torch
from transformers import LlamaConfig

from inflight.bench.gpu.engine import device, steps
from inflight.bench.gpu.engine.random_model import make_model
from inflight.bench.gpu.roofline import ModelShape
from inflight.executor.attention.backend import KvShape, LayerKv
from inflight.executor.attention.choice import choose_backend
from inflight.executor.attention.flashinfer import Heads, open_flashinfer
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.scheduler.limits import Batching, SchedulerLimits
from inflight.executor.scheduler.sequence import NO_PROCESSORS, Processors

BLOCK_SIZE = 16
CONTEXT_LENGTH = 8192
NUM_DECODE_STEPS = 50
# The default of `cuda_graph_max_tokens`.
MAX_GRAPH_TOKENS = 512
DTYPE = torch.bfloat16
PENALTIES = Processors(repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1)


def why_not() -> str | None:
    """Why nothing can be measured here, in words."""
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU here"
    choice = choose_backend("auto", torch.device("cuda", 0), DTYPE, [KvShape(8, 128)])
    return None if choice.backend.name == "triton" else choice.reason


def circumstances() -> dict[str, str]:
    """GPU and versions, in words."""
    gpu = torch.cuda.get_device_properties(0)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "triton", "transformers"))
    return {
        "gpu": f"{gpu.name}, {gpu.multi_processor_count} processors, {gpu.total_memory / 2**30:.0f} GiB",
        "software": f"{versions}, CUDA {torch.version.cuda}, Python {platform.python_version()}",
    }


class GpuSession:
    """A model with random weights. KV and graphs exist only within the calls that need them. In FP8 are
    weights of layers, keys and values."""

    def __init__(self, shape: ModelShape, *, is_fp8: bool = False) -> None:
        config = LlamaConfig(**shape.config_fields, max_position_embeddings=CONTEXT_LENGTH)
        self._gpu = torch.device("cuda", 0)
        backend = choose_backend("triton", self._gpu, DTYPE, [KvShape(shape.num_kv_heads, shape.head_dim)]).backend
        self._model = make_model(config, backend, DTYPE, self._gpu, is_fp8=is_fp8)

    def decode_s(self, num_sequences: int, context: int, *, has_penalties: bool = False) -> tuple[float, float]:
        """Seconds of a step of decodes through the runner, and of the device's part alone, without penalties."""
        processors = PENALTIES if has_penalties else NO_PROCESSORS
        blocks_each = -(-(context + NUM_DECODE_STEPS + steps.WARM_UP_STEPS) // BLOCK_SIZE)
        with self._runner(_limits(num_sequences, 16), num_sequences * blocks_each, max_graph_tokens=0) as runner:
            step_s = steps.decode_step_s(runner, num_sequences, context, BLOCK_SIZE, NUM_DECODE_STEPS, processors)
            return step_s, device.elapsed_s(partial(runner.repeat_decodes, num_sequences))

    def first_logits(self, num_sequences: int, context: int) -> torch.Tensor:
        """The logits `[vocabulary]` of one decode beside `num_sequences - 1` others. Its prompt, and each of theirs, is
        computed in a step of its own, and no step is a graph."""
        num_blocks = num_sequences * -(-(context + 2) // BLOCK_SIZE)
        limits = _limits(num_sequences, max(context, 16))
        with self._runner(limits, num_blocks, max_graph_tokens=0, uses_graphs=False) as runner:
            return steps.first_logits(runner, num_sequences, context, BLOCK_SIZE)

    def decode_kernels(self, num_sequences: int, context: int) -> list[device.Kernel]:
        """The kernels of a step of decodes, without its upload."""
        num_blocks = num_sequences * -(-(context + steps.WARM_UP_STEPS + 1) // BLOCK_SIZE)
        with self._runner(_limits(num_sequences, 16), num_blocks, max_graph_tokens=0) as runner:
            steps.decode_step_s(runner, num_sequences, context, BLOCK_SIZE, 1)
            return device.kernels_of(partial(runner.repeat_decodes, num_sequences))

    def prefill_kernels(self, num_tokens: int) -> list[device.Kernel]:
        """The kernels of a step that computes one prompt."""
        with self._runner(_limits(1, num_tokens), -(-num_tokens // BLOCK_SIZE)) as runner:
            return device.kernels_of(lambda: steps.prefill(runner, num_tokens, BLOCK_SIZE), repetitions=3)

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds of a step that computes one prompt."""
        with self._runner(_limits(1, num_tokens), -(-num_tokens // BLOCK_SIZE)) as runner:
            return steps.prefill_step_s(runner, num_tokens, BLOCK_SIZE)

    def attention_s(self, num_sequences: int, context: int) -> float:
        """Seconds of one layer's attention for decodes."""
        num_blocks = num_sequences * -(-context // BLOCK_SIZE)
        with self._kv(num_blocks) as kv, torch.inference_mode():
            num_heads = self._model.decoder.shape.num_heads
            return steps.attention_s(self._model.backend, kv, num_heads, num_sequences, context, BLOCK_SIZE)

    def chunk_attention_s(self, num_tokens: int, context: int, backend_name: str) -> float:
        """Seconds of one layer's attention for a prompt chunk by `triton` or `flashinfer`."""
        decoder, backend = self._model.decoder, self._model.backend
        shape = KvShape(decoder.shape.num_kv_heads, decoder.shape.head_dim)
        heads = Heads(decoder.shape.num_heads, shape, decoder.scorings)
        with self._kv(-(-context // BLOCK_SIZE)) as kv, torch.inference_mode():
            flashinfer = open_flashinfer(backend_name, heads, DTYPE, [DTYPE], self._gpu, backend)
            return steps.chunk_attention_s(backend, flashinfer, kv, heads, num_tokens, context, BLOCK_SIZE)

    @contextmanager
    def _runner(
        self,
        limits: SchedulerLimits,
        num_blocks: int,
        max_graph_tokens: int = MAX_GRAPH_TOKENS,
        *,
        uses_graphs: bool = True,
    ) -> Iterator[GpuRunner]:
        decoder = self._model.decoder
        with self._kv(num_blocks) as kv:
            runner = GpuRunner(
                decoder, kv, limits, BLOCK_SIZE, uses_graphs=uses_graphs, max_graph_tokens=max_graph_tokens
            )
            runner.prepare()
            try:
                yield runner
            finally:
                runner.close()
                del runner

    @contextmanager
    def _kv(self, num_blocks: int) -> Iterator[tuple[LayerKv, ...]]:
        release_memory()
        yield self._model.allocate_kv(num_blocks, BLOCK_SIZE)
        release_memory()


def release_memory() -> None:
    """Gives memory that nothing uses back to the device."""
    gc.collect()
    torch.cuda.empty_cache()


def _limits(max_num_sequences: int, max_num_tokens: int) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_sequences=max_num_sequences,
        num_standby_sequences=0,
        max_num_tokens=max(max_num_tokens, max_num_sequences),
        context_length=CONTEXT_LENGTH,
        enable_chunked_context=True,
        batching=Batching.INFLIGHT,
        enable_prefix_cache=True,
    )
