"""A causal language model of transformers, computed step by step with a paged KV pool.

It owns weights and KV. It runs any decoder whose code calls attention through transformers' attention interface. A
model that cannot run correctly is refused at load with the reason (`checkpoint.support`, `attention.transformers_hook`,
`self_check`). It knows nothing of scheduling.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from inflight.common.machine import num_available_memory_bytes, return_free_memory
from inflight.common.model_files.context_length import context_length_of
from inflight.common.model_source import ModelError, ModelSource, model_errors
from inflight.common.version import installed_version
from inflight.executor.attention.backend import AttentionBackend, KvShape, LayerKv
from inflight.executor.attention.choice import BackendChoice, choose_backend
from inflight.executor.attention.cpu import CpuAttention
from inflight.executor.attention.flashinfer import FlashInfer, Heads, open_flashinfer
from inflight.executor.attention.host_tier import HostTier, open_host_tier
from inflight.executor.attention.quantized import check_backend, check_fp8_device, kv_dtype_name, kv_dtypes
from inflight.executor.attention.transformers_hook import (
    ATTENTION_NAME,
    Layer,
    LayerProbe,
    PagedStep,
    register_attention,
)
from inflight.executor.checkpoint.decoder_weights import DecoderWeights, read_decoder
from inflight.executor.checkpoint.files import GenerationDefaults, read_generation_defaults
from inflight.executor.checkpoint.longrope import fix_longrope
from inflight.executor.checkpoint.packed_linear import pack_linears
from inflight.executor.checkpoint.quantized_linear import is_quantized, make_dense
from inflight.executor.checkpoint.quiet import quiet_transformers
from inflight.executor.checkpoint.rounding import round_linears
from inflight.executor.checkpoint.shards import WHOLE, Shard, digest_of, divide, indivisible_reason
from inflight.executor.cpu.decoder import DecoderForm, NativeDecoder, form_of, unsupported_reason
from inflight.executor.cpu.sampler import NativeSampler, choose_sampler
from inflight.executor.cpu.streams import WeightStream
from inflight.executor.formats.loading import load_network
from inflight.executor.model.end_tokens import find_end_tokens
from inflight.executor.model.layer_check import compare_layers
from inflight.executor.model.self_check import BLOCK_SIZE, NUM_BLOCKS, Expectation, SelfCheckError, compare, expect
from inflight.executor.parallel.decoder import ParallelDecoder
from inflight.executor.parallel.leader import WorkerGroup
from inflight.executor.parallel.member import Hello
from inflight.executor.step.batch import StepBatch
from inflight.executor.step.logprobs import StepLogprobs, step_logprobs
from inflight.executor.step.sampling import choose_greedily, name_excluded, sample
from inflight.executor.step.sampling_columns import SamplingBatch

if TYPE_CHECKING:
    from inflight.executor.gpu.decoder import GpuDecoder
    from inflight.executor.parallel.gpu_leader import GpuRanks

log = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# The attention backends whose forward pass multiplies weights of these types.
NEEDED_BACKENDS = {"int8": "cpu", "int4": "cpu", "fp8": "triton"}


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Properties of a model. Defaults of sampling are None where its generation config has none."""

    architecture: str
    revision: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocabulary_size: int
    context_length: int
    defaults: GenerationDefaults

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end an output."""
        return self.defaults.eos_token_ids


class PagedModel:
    """A loaded model. `allocate_kv` must precede the first `forward`."""

    def __init__(
        self,
        network: PreTrainedModel,
        layers: tuple[Layer, ...],
        choice: BackendChoice,
        description: ModelDescription,
        gpu_decoder: GpuDecoder | None = None,
        native: NativeDecoder | None = None,
        sampler: NativeSampler | None = None,
        layer_kv_dtypes: Sequence[torch.dtype] = (),
        weight_dtype: str = "auto",
        *,
        device: torch.device | None = None,
    ) -> None:
        """`device` is that of the network unless it is given, for weights that were copied to another one."""
        self.description = description
        self.device = device or network.device
        self.dtype = network.dtype
        self.backend_name = choice.backend.name
        self.backend_reason = choice.reason
        # A native forward pass in place of transformers', whose weights are then not needed.
        self.gpu_decoder = gpu_decoder
        self.native = native
        # With other ranks, what computes on all of them; `native` is then this rank's part of it.
        self.parallel: ParallelDecoder | None = None
        # With other ranks on GPUs, the others; `gpu_decoder` is then this rank's part.
        self.gpu_ranks: GpuRanks | None = None
        is_shard = gpu_decoder is not None and gpu_decoder.shard.num_ranks > 1
        self._network = network if native is None and not is_shard else None
        self._layers = layers
        self._weight_dtype = weight_dtype
        self._layer_kv_dtypes = tuple(layer_kv_dtypes) or (network.dtype,) * len(layers)
        self.backend = choice.backend
        self._sampler = sampler
        # Properties, by name, in which the ranks of an executor must agree.
        self.same_on_all_ranks: Mapping[str, str] = {}
        self._kv: tuple[LayerKv, ...] = ()
        # What the runner may compute chunks by, once it is opened.
        self.flashinfer: FlashInfer | None = None

    @classmethod
    def load(
        cls,
        source: ModelSource,
        *,
        dtype_name: str = "auto",
        backend_name: str = "auto",
        device_name: str = "auto",
        weight_dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        kv_cache_skip_layers: Sequence[int] = (),
        forward_name: str = "auto",
        instructions: str = "auto",
        weight_stream: WeightStream | None = None,
        max_sequence_length: int = 0,
        eos_token_ids: Sequence[int] = (),
        shard: Shard = WHOLE,
        group: WorkerGroup | None = None,
    ) -> PagedModel:
        """Loads and checks a model. Raises `ModelError` with the reason if it cannot be served.

        `weight_dtype` is `auto` (that of the checkpoint), `dense`, which expands a quantized checkpoint to the dtype,
        `int8` or `fp8`, with which layers multiply in that type, or `int4`, which rounds linear layers to 4 bits.
        `kv_cache_dtype` is `auto`, `int8` or `fp8`; layers of `kv_cache_skip_layers` keep the dtype of the activations.
        `forward_name` is `auto` (native where the model has a native forward pass) or `transformers`. `instructions`
        names the build of the C++ code, and `weight_stream` how it reads the weights; without it the fastest way is
        measured. `max_sequence_length`, or with 0 the context length, decides between the factors of longrope.
        `eos_token_ids` replace those of the model's files. Of several ranks, this is the one of `shard`; the leader has
        the `group` of the others, which must join before the model is checked.
        """
        device = choose_device(device_name)
        dtype = choose_dtype(dtype_name, device)
        # The whole model need not fit in the memory of one rank's GPU.
        network, folder = load_network(source, dtype, device if shard.num_ranks == 1 else torch.device("cpu"))
        length, weight_dtype = _sequence_length(network, max_sequence_length), _with_weights_of(network, weight_dtype)
        with _unsupported(network.config):
            _choose_rope(network, length)
            vocabulary_size, has_fp8 = _vocabulary_size(network), "fp8" in (weight_dtype, kv_cache_dtype)
            expectation = expect(network, vocabulary_size, has_states=has_fp8) if shard.rank == 0 else None
            layers = _probe_layers(network)
        layer_kv_dtypes = kv_dtypes(kv_cache_dtype, kv_cache_skip_layers, dtype, len(layers))
        choice = choose_backend(backend_name, device, dtype, [layer.shape for layer in layers], instructions)
        _check_choice(choice, layer_kv_dtypes, device)
        sampler = _native_sampler(choice.backend, device, instructions)
        end_ids = find_end_tokens(source, folder, vocabulary_size, eos_token_ids) if shard.rank == 0 else ()
        with model_errors(f"model {source.name!r} cannot be prepared"):
            description = _describe(source, folder, network, layers, end_ids)
            native = _native_forward(
                network, layers, choice, description, weight_dtype, forward_name, length, weight_stream, shard, device
            )
            parts = (network, _layers_of(layers, shard), choice, description, native.gpu, native.native, sampler)
            model = cls(*parts, layer_kv_dtypes, weight_dtype, device=device)
            model.same_on_all_ranks = native.same_on_all_ranks
            if group is not None:
                model._lead(group)
        if expectation is not None:
            with _unsupported(network.config):
                model._check(expectation)
        del network
        return_free_memory()
        return model

    @property
    def kv(self) -> tuple[LayerKv, ...]:
        """The KV of each layer, once it is allocated."""
        return self._kv

    @property
    def dtype_name(self) -> str:
        """`bfloat16` or `float32`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def weight_dtype_name(self) -> str:
        """Type of the layers' weights: that of the model, `quantized` as in the checkpoint, `int8`, `int4` or `fp8`."""
        return self.dtype_name if self._weight_dtype in ("auto", "dense") else self._weight_dtype

    @property
    def kv_cache_dtype_name(self) -> str:
        """Type of the KV cache, and which layers of a quantized one are excepted."""
        return kv_dtype_name(self._layer_kv_dtypes, self.dtype)

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None: the whole context."""
        return tuple(layer.scoring.sliding_window for layer in self._layers)

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Returns the memory of one more block in all layers."""
        return sum(self.kv_bytes_per_group_block(block_size))

    def kv_bytes_per_group_block(self, block_size: int) -> tuple[int, int]:
        """Returns the memory of one more block in the layers that attend to the whole context, and in those with a
        sliding window."""
        sizes = [0, 0]
        for layer, kv in zip(self._layers, self._allocate(1, block_size, 1), strict=True):
            sizes[layer.scoring.sliding_window is not None] += kv.num_bytes
        return sizes[0], sizes[1]

    def allocate_kv(self, num_blocks: int, block_size: int, num_window_blocks: int | None = None) -> None:
        """Allocates blocks 1 to `num_blocks`, and the spare block 0. Layers with a sliding window have
        `num_window_blocks` instead, if that is not None; batches must then have window tables."""
        if self.parallel is not None:
            self.parallel.allocate_kv(num_blocks, block_size, num_window_blocks)
        if self.gpu_ranks is not None:
            self.gpu_ranks.allocate_kv(num_blocks, block_size)
        self._kv = self._allocate(
            num_blocks + 1, block_size, (num_blocks if num_window_blocks is None else num_window_blocks) + 1
        )

    def open_host_tier(self, num_host_blocks: int) -> HostTier:
        """Opens a host tier for the allocated blocks."""
        if self.parallel is not None:
            return self.parallel.open_host_tier(self._kv, num_host_blocks)
        return open_host_tier(self._kv, num_host_blocks)

    def open_flashinfer(self, backend_name: str) -> None:
        """Opens FlashInfer where the setting asks for it, before memory is measured: its buffers are in the device's.
        Raises `ModelError` if it is named and cannot run."""
        if self.gpu_ranks is not None:
            return  # ranks would choose by measurements of their own
        heads, decoder = None, self.gpu_decoder
        if decoder is not None:
            shape = decoder.shape
            heads = Heads(shape.num_heads, KvShape(shape.num_kv_heads, shape.head_dim), decoder.scorings)
        self.flashinfer = open_flashinfer(
            backend_name, heads, self.dtype, self._layer_kv_dtypes, self.device, self.backend
        )

    def free_kv(self) -> None:
        """Frees the blocks' memory."""
        self._kv = ()

    def forward(self, batch: StepBatch) -> Tensor:
        """Computes every token of the batch, stores its KV, and returns the logits `[R + Q, vocabulary]` in
        float32."""
        if self.gpu_ranks is not None:
            self.gpu_ranks.compute(batch)
        batch = batch.to(self.device)
        if self.parallel is not None:
            return self.parallel.logits(batch, self._kv)
        if self.native is not None:
            return self.native.logits(batch, self._kv)
        step = PagedStep(self.backend, self._layers, self._kv, batch)
        with torch.inference_mode():
            if self.gpu_decoder is not None:
                return self.gpu_decoder.forward(batch, self._kv).float()
            assert self._network is not None
            logits: Tensor = self._network(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.logit_rows,
                inflight_step=step,
            ).logits
            return logits[0].float()

    def step(
        self, batch: StepBatch, sampling: SamplingBatch, before_sampling: Callable[[], None] | None = None
    ) -> tuple[Tensor, StepLogprobs | None]:
        """Computes the batch, calls `before_sampling`, and samples. Returns the token ids `[R]` int64, on the model's
        device, and the log probabilities that rows report."""
        if self.parallel is not None:
            if sampling.is_greedy and not sampling.reporting:
                return self.parallel.greedy(batch, self._kv), None
        elif self.native is not None and sampling.takes_largest and not sampling.reporting:
            return self.native.greedy(batch, self._kv, sampling), None
        logits = self.forward(batch)
        if before_sampling is not None:
            before_sampling()
        sampled_ids = self.choose(logits[: sampling.num_rows], sampling)
        if not sampling.reporting:
            return sampled_ids, None
        chosen_ids = torch.cat([sampled_ids, batch.target_ids.to(sampled_ids.device)])
        return sampled_ids, step_logprobs(logits, chosen_ids, sampling.reporting)

    def choose(self, logits: Tensor, sampling: SamplingBatch) -> Tensor:
        """Returns the token ids `[R]` int64 of `logits[R, vocabulary]` float32; for a row without one `NO_TOKEN` or
        `ALL_EXCLUDED`. The logits are undefined afterwards unless a row reports log probabilities."""
        if sampling.is_greedy:
            return choose_greedily(logits)
        if self._sampler is not None:
            return self._sampler.sample(logits, sampling, may_change=not sampling.reporting)
        token_ids = sample(logits, sampling.rows())
        return name_excluded(token_ids, logits) if sampling.excludes else token_ids

    def hello(self, rank: int) -> Hello:
        """Returns what this rank tells the others of itself."""
        same = {
            "version": installed_version(),
            "dtype": self.dtype_name,
            "weight dtype": self.weight_dtype_name,
            "KV cache dtype": self.kv_cache_dtype_name,
            **self.same_on_all_ranks,
        }
        return Hello(rank, same, socket.gethostname(), num_available_memory_bytes() or 0)

    def _check(self, expectation: Expectation) -> None:
        """Raises `ModelError` if the model yields other logits than transformers."""
        self.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
        if expectation.states is not None and self.gpu_decoder is not None:
            compare_layers(expectation, self._separate_layers, self.forward)
        else:
            compare(
                expectation,
                self.forward,
                self.dtype,
                has_rounded_products=self.weight_dtype_name == "int8",
                quantized_kv=next((kv for kv in self._layer_kv_dtypes if kv != self.dtype), None),
                routes_by_itself=self.native is not None and self.native.form.shape.num_experts > 0,
            )
        self.free_kv()

    @torch.inference_mode()
    def _separate_layers(self, inputs: Tensor, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """See `GpuDecoder.separate_layers`."""
        assert self.gpu_decoder is not None
        return self.gpu_decoder.separate_layers(inputs, batch.to(self.device), self._kv)

    def _lead(self, group: WorkerGroup) -> None:
        """Waits for the other ranks, and computes with them from now on."""
        group.join(self.hello(0))
        if self.gpu_decoder is not None:
            from inflight.executor.parallel.gpu_leader import GpuRanks  # imports triton, which only this needs

            self.gpu_decoder.ranks = ranks = group.open_device_exchange(self.device)
            self.gpu_ranks = GpuRanks(group, ranks)
            return
        assert isinstance(self.native, NativeDecoder) and isinstance(self.backend, CpuAttention)
        exchange = group.open_exchange(self.native, self.backend.library)
        self.parallel = ParallelDecoder(self.native, group, exchange)

    def _allocate(self, num_blocks: int, block_size: int, num_window_blocks: int) -> tuple[LayerKv, ...]:
        return tuple(
            self.backend.allocate(
                layer.shape,
                num_blocks if layer.scoring.sliding_window is None else num_window_blocks,
                block_size,
                kv_dtype,
                self.device,
            )
            for layer, kv_dtype in zip(self._layers, self._layer_kv_dtypes, strict=True)
        )


@dataclass(frozen=True, slots=True)
class NativeForward:
    """A native forward pass, at most one of the two."""

    gpu: GpuDecoder | None = None
    native: NativeDecoder | None = None
    same_on_all_ranks: Mapping[str, str] = field(default_factory=dict)


def _check_choice(choice: BackendChoice, kv_dtypes: Sequence[torch.dtype], device: torch.device) -> None:
    check_backend(kv_dtypes, choice.backend, device)
    if choice.is_fallback:
        log.warning("attention backend %s", choice.reason)


def _with_weights_of(network: PreTrainedModel, weight_dtype: str) -> str:
    """Expands or rounds the weights as `weight_dtype` asks for. Returns the type that they have then."""
    if weight_dtype == "dense":
        make_dense(network, network.dtype)
    if weight_dtype == "int4":
        log.info("%d linear layers are rounded to 4 bits, the output layer to 8", round_linears(network))
    return "quantized" if weight_dtype == "auto" and is_quantized(network) else weight_dtype


def _native_forward(
    network: PreTrainedModel,
    layers: tuple[Layer, ...],
    choice: BackendChoice,
    description: ModelDescription,
    weight_dtype: str,
    forward_name: str,
    context_length: int,
    weight_stream: WeightStream | None,
    shard: Shard,
    device: torch.device,
) -> NativeForward:
    """Packs the weights for a native forward pass where the model has one, else for transformers'."""
    needed = "the native forward pass on a " + ("GPU" if weight_dtype == "fp8" else "CPU")
    if weight_dtype in NEEDED_BACKENDS and choice.backend.name != NEEDED_BACKENDS[weight_dtype]:
        raise ModelError(f"{weight_dtype} weights need {needed}, and the attention backend is {choice.backend.name}")
    if weight_dtype == "fp8":
        _check_fp8_weights(network)
    if choice.backend.name == "triton":
        make_dense(network, network.dtype)
    weights: DecoderWeights | str = "forward=transformers is set"
    if forward_name == "auto":
        weights = read_decoder(network, layers, context_length)
    if choice.backend.name == "triton" and not isinstance(weights, str):
        gpu = _gpu_decoder(weights, choice, description, weight_dtype == "fp8", shard, device)
        if not isinstance(gpu, str):
            return NativeForward(gpu=gpu, same_on_all_ranks=_same_on_all_ranks(weights, device_name(device), shard))
        weights = gpu
    if isinstance(choice.backend, CpuAttention) and not isinstance(weights, str):
        obstacle = unsupported_reason(weights.shape)
        if obstacle is None:
            _check_divisible(weights, shard)
            form = form_of(weights, network.dtype, weight_dtype == "int8")
            same_on_all_ranks = _same_on_all_ranks(weights, choice.backend.library.instructions, shard)
            native = _native_decoder(weights, choice.backend, form, weight_stream, shard)
            return NativeForward(native=native, same_on_all_ranks=same_on_all_ranks)
        weights = obstacle
    if isinstance(weights, str):
        log.info("using the forward pass of transformers, because %s", weights)
    if weight_dtype in NEEDED_BACKENDS:
        raise ModelError(f"{weight_dtype} weights need {needed}, and {weights}")
    if shard.num_ranks > 1:
        why = weights if isinstance(weights, str) else f"the attention backend is {choice.backend.name}"
        raise ModelError(f"tensor parallelism needs the native forward pass on a CPU or GPU, and {why}")
    pack_linears(network)
    return NativeForward()


def _check_fp8_weights(network: PreTrainedModel) -> None:
    """Raises `ModelError` if the GPU of a network cannot multiply its dtype's rows in FP8."""
    check_fp8_device("weight_dtype", network.device)
    if network.device.type == "cuda" and network.dtype != torch.bfloat16:
        raise ModelError("weight_dtype fp8 needs dtype bfloat16 on a GPU")


def _gpu_decoder(
    weights: DecoderWeights,
    choice: BackendChoice,
    description: ModelDescription,
    has_fp8_weights: bool,
    shard: Shard,
    device: torch.device,
) -> GpuDecoder | str:
    """Returns the forward pass, or the reason why there is none for this model."""
    # They import triton, which only this backend needs.
    from inflight.executor.gpu.decoder import GpuDecoder, undivided_reason, unsupported_reason

    if obstacle := unsupported_reason(weights.shape):
        return obstacle
    if shard.num_ranks > 1:
        if obstacle := undivided_reason(weights):
            return obstacle
        _check_divisible(weights, shard)
        weights = divide(weights, shard, device)
    return GpuDecoder(weights, choice.backend, description.context_length, has_fp8_weights=has_fp8_weights, shard=shard)


def _check_divisible(weights: DecoderWeights, shard: Shard) -> None:
    if reason := indivisible_reason(weights.shape, shard.num_ranks):
        raise ModelError(f"tensor_parallel_size={shard.num_ranks}: {reason}")


def _native_decoder(
    weights: DecoderWeights, backend: CpuAttention, form: DecoderForm, stream: WeightStream | None, shard: Shard
) -> NativeDecoder:
    """Packs the model, or a shard of it, for the C++ code. The network cannot compute with quantized weights then."""
    native = NativeDecoder(backend.library, backend.pool, form, stream, shard)
    log.info("weights are read with %s", native.stream)
    native.pack(weights, frees_quantized=True)
    return native


def _same_on_all_ranks(weights: DecoderWeights, processor: str, shard: Shard) -> Mapping[str, str]:
    """`processor` determines how numbers are rounded: an instruction set, or the name of a GPU."""
    if shard.num_ranks == 1:
        return {}
    return {
        "number of ranks": str(shard.num_ranks),
        "model": digest_of(weights),
        "instruction set": processor,
    }


def _layers_of(layers: tuple[Layer, ...], shard: Shard) -> tuple[Layer, ...]:
    """Returns the layers with the KV heads of a shard."""
    return tuple(
        replace(layer, shape=replace(layer.shape, num_kv_heads=shard.num_kv_heads(layer.shape.num_kv_heads)))
        for layer in layers
    )


def _native_sampler(backend: AttentionBackend, device: torch.device, instructions: str) -> NativeSampler | None:
    if isinstance(backend, CpuAttention):
        return NativeSampler(backend.library, backend.pool)
    return choose_sampler(device, instructions)


def choose_device(name: str) -> torch.device:
    """Returns the named device; `auto` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("device 'cuda' is requested, but torch finds no GPU")
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def device_name(device: torch.device) -> str:
    """Returns the name of the GPU; on a CPU that of the interpreter of its kernels."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreted"


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Returns the named dtype; `auto` is bfloat16 if the processor multiplies it, else float32, which is faster
    there."""
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise ModelError(f"dtype {name!r} is unknown; use auto, {' or '.join(DTYPES)}")
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    has_instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if has_instructions else torch.float32


@contextmanager
def _unsupported(config: PretrainedConfig) -> Iterator[None]:
    """Adds the architecture to the errors raised in the context, except those of the self-check."""
    what = f"model architecture {config.model_type!r} is not supported"
    try:
        with model_errors("it fails under paged attention"):
            yield
    except SelfCheckError:
        raise
    except ModelError as error:
        raise ModelError(f"{what}: {error}") from error


def _probe_layers(network: PreTrainedModel) -> tuple[Layer, ...]:
    register_attention()
    with quiet_transformers():
        network.set_attn_implementation(ATTENTION_NAME)
    probe = LayerProbe()
    token_ids = torch.zeros((1, 2), dtype=torch.long, device=network.device)
    with torch.inference_mode():
        network(input_ids=token_ids, use_cache=False, inflight_step=probe)
    return probe.layers(network.config.get_text_config(decoder=True))


def _describe(
    source: ModelSource, folder: Path, network: PreTrainedModel, layers: tuple[Layer, ...], end_ids: tuple[int, ...]
) -> ModelDescription:
    vocabulary_size = _vocabulary_size(network)
    return ModelDescription(
        architecture=network.config.model_type,
        revision=source.revision,
        num_layers=len(layers),
        num_kv_heads=layers[0].shape.num_kv_heads,
        head_dim=layers[0].shape.head_dim,
        vocabulary_size=vocabulary_size,
        context_length=_context_length(network),
        defaults=_defaults(folder, vocabulary_size, end_ids),
    )


def _choose_rope(network: PreTrainedModel, max_sequence_length: int) -> None:
    choice = fix_longrope(network, max_sequence_length)
    if choice is not None:
        log.info("longrope uses its %s", choice)


def _context_length(network: PreTrainedModel) -> int:
    context_length = context_length_of(network.config.get_text_config(decoder=True).to_dict())
    if context_length is None:
        raise ModelError("its configuration has no context length")
    return context_length


def _sequence_length(network: PreTrainedModel, max_sequence_length: int) -> int:
    """Returns the longest sequence that is accepted. Raises `ModelError` if the setting is above the context length."""
    with _unsupported(network.config):
        context_length = _context_length(network)
    if max_sequence_length > context_length:
        raise ModelError(
            f"max_sequence_length={max_sequence_length} is above {context_length}, the context length that the model's "
            "configuration gives; 0 takes that"
        )
    return max_sequence_length or context_length


def _defaults(folder: Path, vocabulary_size: int, end_ids: tuple[int, ...]) -> GenerationDefaults:
    defaults = read_generation_defaults(folder, end_ids)
    highest = max((max(ids) for ids in defaults.bad_word_ids), default=0)
    if highest >= vocabulary_size:
        raise ModelError(f"generation_config.json: bad_words_ids has token id {highest} of {vocabulary_size}")
    return defaults


def _vocabulary_size(network: PreTrainedModel) -> int:
    """Returns the number of ids that the model can both read and write."""
    modules: Any = (network.get_input_embeddings(), network.get_output_embeddings())
    return min(int(module.weight.shape[0]) for module in modules)
