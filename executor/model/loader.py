"""Loading of a model: its weights, the forward pass that computes it, and the checks before it is served.

It loads any decoder whose code calls attention through transformers' attention interface. A model that cannot run
correctly is refused with the reason (`checkpoint.support`, `attention.transformers_hook`, `self_check`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from inflight.common.machine import num_available_memory_bytes, return_free_memory
from inflight.common.model_source import ModelError, ModelSource, model_errors
from inflight.executor.attention.backend import AttentionBackend, KvShape
from inflight.executor.attention.choice import BackendChoice, choose_backend
from inflight.executor.attention.cpu import CpuAttention
from inflight.executor.attention.flashinfer import FlashInfer, Heads, open_flashinfer
from inflight.executor.attention.kv_layout import KvLayout
from inflight.executor.attention.quantized import check_backend, check_fp8_device, kv_dtypes
from inflight.executor.attention.transformers_hook import ATTENTION_NAME, Layer, LayerProbe, register_attention
from inflight.executor.checkpoint.decoder_weights import SQUARED_RELU, DecoderWeights, read_decoder
from inflight.executor.checkpoint.expert_matrices import expand_experts, order_experts
from inflight.executor.checkpoint.fp8_weight import is_fp8_of_rows
from inflight.executor.checkpoint.longrope import fix_longrope
from inflight.executor.checkpoint.packed_linear import pack_linears
from inflight.executor.checkpoint.quantized_linear import (
    QuantizedLinear,
    expand_fp8,
    is_quantized,
    make_dense,
)
from inflight.executor.checkpoint.quiet import quiet_transformers
from inflight.executor.checkpoint.rounding import round_linears
from inflight.executor.checkpoint.shards import WHOLE, Shard, digest_of, divide, indivisible_reason
from inflight.executor.cpu.decoder import NativeDecoder, form_of, stream_for, unsupported_reason
from inflight.executor.cpu.sampler import NativeSampler, choose_sampler
from inflight.executor.cpu.streams import WeightStream
from inflight.executor.cpu.weight_form import (
    ExecutorSizes,
    FormChoice,
    WeightForm,
    choose_form,
    measure_with,
    read_quantized,
)
from inflight.executor.device import choose_device, choose_dtype, is_gpu
from inflight.executor.device import device_name as name_of
from inflight.executor.formats.loading import load_network
from inflight.executor.forward.forward import Forward, SeparatesLayers
from inflight.executor.forward.hybrid import HybridForward
from inflight.executor.forward.native import NativeForward
from inflight.executor.forward.native_ranks import NativeRanks
from inflight.executor.forward.transformers import TransformersForward
from inflight.executor.model.description import (
    ModelDescription,
    describe,
    read_context_length,
    read_defaults,
    read_vocabulary_size,
)
from inflight.executor.model.end_tokens import find_end_tokens
from inflight.executor.model.layer_check import OF_CODES, OF_FP8, compare_layers
from inflight.executor.model.model import PagedModel
from inflight.executor.model.pooling import read_pooling
from inflight.executor.model.self_check import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    NUM_SLOTS,
    Expectation,
    SelfCheckError,
    compare,
    expect,
)
from inflight.executor.parallel.leader import WorkerGroup
from inflight.executor.pooling.pooled import Pooling, PoolingKind
from inflight.executor.recurrent.mixer import Mixer, StateSizes
from inflight.executor.recurrent.network import attention_layers, replace_recurrent_layers
from inflight.executor.step.batch import StepBatch

if TYPE_CHECKING:
    from inflight.executor.gpu.decoder import GpuDecoder

log = logging.getLogger(__name__)

# The attention backends whose forward pass multiplies weights of these types.
NEEDED_BACKENDS = {"quantized_a8": "cpu", "int8": "cpu", "int4": "cpu", "fp8": "triton"}
# The types with which the weights of a quantized checkpoint stay as they are.
AS_QUANTIZED = ("quantized", "quantized_a8")
# The bits of the types to which weights are rounded on a CPU, without scales.
ROUNDED_BITS = {"int8": 8, "int4": 4}
FORWARD_IS_SET = "forward=transformers is set"


def load_model(
    source: ModelSource,
    *,
    dtype_name: str = "auto",
    backend_name: str = "auto",
    device_name: str = "auto",
    weight_dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    kv_cache_skip_layers: Sequence[int] = (),
    forward_name: str = "auto",
    pooling_name: str = "auto",
    instructions: str = "auto",
    weight_stream: WeightStream | None = None,
    max_sequence_length: int = 0,
    eos_token_ids: Sequence[int] = (),
    sizes: ExecutorSizes | None = None,
    shard: Shard = WHOLE,
    group: WorkerGroup | None = None,
) -> PagedModel:
    """Loads and checks a model. Raises `ModelError` with the reason if it cannot be served.

    `weight_dtype` is `auto` (as in the checkpoint; with `sizes` `quantized_a8` or `dense` if that is clearly faster),
    `quantized`, `quantized_a8`, whose products round activations, `dense`, which expands a quantized checkpoint, `int8`
    or `fp8`, with which layers multiply in that type, or `int4`, which rounds linear layers.
    `kv_cache_dtype` is `auto`, `int8` or `fp8`; layers of `kv_cache_skip_layers` keep the dtype of the activations.
    `forward_name` is `auto` (native where the model has a native forward pass) or `transformers`. `pooling_name` is for
    `read_pooling`. `instructions` names the build of the C++ code, and `weight_stream` how it reads the weights;
    without it the fastest way is measured. `max_sequence_length`, or with 0 the context length, decides between the
    factors of longrope. `eos_token_ids` replace those of the model's files. Of several ranks, this is the one of
    `shard`; the leader has the `group` of the others, which must join before the model is checked.
    """
    dtype = choose_dtype(dtype_name, device := choose_device(device_name))
    network, folder = load_network(source, dtype, *_place(weight_dtype, dtype, device, shard))
    length, sizes = _sequence_length(network, max_sequence_length), sizes if weight_dtype == "auto" else None
    weight_dtype = _with_weights_of(network, weight_dtype)
    with _unsupported(network.config):
        _choose_rope(network, length)
        vocabulary_size, has_fp8 = read_vocabulary_size(network), "fp8" in (weight_dtype, kv_cache_dtype)
        has_codes = weight_dtype == "quantized" and (is_gpu(device) or backend_name == "triton")
        expectation = expect(network, vocabulary_size, has_states=has_fp8 or has_codes) if shard.rank == 0 else None
        mixers = replace_recurrent_layers(network)
        layers = _probe_layers(network)
    layer_kv_dtypes = _kv_dtypes(kv_cache_dtype, kv_cache_skip_layers, dtype, network)
    choice = choose_backend(backend_name, device, dtype, [layer.shape for layer in layers], instructions)
    _check_choice(choice, layer_kv_dtypes, device)
    sampler = _native_sampler(choice.backend, device, instructions)
    pooling = read_pooling(network, source, pooling_name)
    end_ids = find_end_tokens(source, folder, vocabulary_size, eos_token_ids) if shard.rank == 0 else ()
    layout = KvLayout(choice.backend, device, dtype, _layers_of(layers, shard), layer_kv_dtypes)
    with model_errors(f"model {source.name!r} cannot be prepared"):
        defaults = read_defaults(folder, vocabulary_size, end_ids)
        weights = _Weights(network, layers, layout, weight_dtype, length, shard, sizes, dtype_name != "float32", mixers)
        chosen = _choose_forward(weights, forward_name, backend_name, weight_stream)
        description = describe(source, network, layout, defaults, chosen.weight_dtype, choice.reason, chosen.same)
        forward = chosen.forward if group is None else _lead(chosen.forward, group, description)
    _check(forward, expectation, description, network.config)
    del network, weights, chosen
    return_free_memory()
    return PagedModel(description, forward, sampler, _checked_pooling(pooling, shard))


def _checked_pooling(pooling: Pooling | None, shard: Shard) -> Pooling | None:
    if pooling is None:
        return None
    if shard.num_ranks > 1:
        raise ModelError(
            f"it makes {'scores' if pooling.kind is PoolingKind.SCORE else 'embeddings'}, which are not built for "
            "tensor_parallel_size above 1; use one rank, or --pooling off to generate only"
        )
    return pooling


@dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    """Weights for which a forward pass is chosen. `layers` are those of the whole model, and `layout` is that of the
    `shard`. `length` is that of the longest sequence. With `sizes` quantized weights may be expanded, and with
    `may_round` the rows that they multiply rounded. `mixers` are the recurrent layers by number, which are not among
    `layers`."""

    network: PreTrainedModel
    layers: tuple[Layer, ...]
    layout: KvLayout
    weight_dtype: str
    length: int
    shard: Shard
    sizes: ExecutorSizes | None
    may_round: bool
    mixers: Mapping[int, Mixer]


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A forward pass, the type of its weights, and the properties, by name, that are to be the same on all ranks."""

    forward: Forward
    weight_dtype: str
    same: Mapping[str, str]


def _choose_forward(weights: _Weights, forward_name: str, backend_name: str, stream: WeightStream | None) -> _Chosen:
    """Packs the weights for a native forward pass where the model has one, else for transformers'."""
    network, backend, weight_dtype = weights.network, weights.layout.backend, weights.weight_dtype
    needed = "the native forward pass on a " + ("GPU" if weight_dtype == "fp8" else "CPU")
    if weight_dtype in NEEDED_BACKENDS and backend.name != NEEDED_BACKENDS[weight_dtype]:
        raise ModelError(f"{weight_dtype} weights need {needed}, and the attention backend is {backend.name}")
    if weights.mixers and backend.name == "triton" and (num_ranks := weights.shard.num_ranks) > 1:
        raise ModelError(f"its recurrent layers run on a GPU without tensor_parallel_size={num_ranks} only")
    if weight_dtype == "fp8":
        _check_fp8_weights(network)
    if backend.name == "triton":
        weights = _with_codes_of_gpu(weights)
    weight_dtype = weights.weight_dtype
    if forward_name == "auto" and backend.name != "reference":
        order_experts(network)
    decoder = read_decoder(network, weights.layers, weights.length) if forward_name == "auto" else FORWARD_IS_SET
    chosen: _Chosen | str | None = None
    if isinstance(decoder, str):
        chosen = decoder
    elif backend.name == "triton":
        chosen = _gpu_forward(weights, decoder, backend_name)
    elif isinstance(backend, CpuAttention):
        chosen = _native_forward(weights, decoder, backend, stream)
    if isinstance(chosen, _Chosen):
        return chosen
    if chosen is not None:
        log.info("using the forward pass of transformers, because %s", chosen)
    if weight_dtype in NEEDED_BACKENDS:
        raise ModelError(f"{weight_dtype} weights need {needed}, and {chosen}")
    if weights.shard.num_ranks > 1:
        why = chosen or f"the attention backend is {backend.name}"
        raise ModelError(f"tensor parallelism needs the native forward pass on a CPU or GPU, and {why}")
    if weights.mixers and backend.name == "triton":
        raise ModelError(f"its recurrent layers need the native forward pass on a GPU, and {chosen}")
    _open_flashinfer(weights, None, backend_name)
    if backend.name == "triton":
        # They import triton, which only this needs.
        from inflight.executor.forward.gpu_network import GpuNetworkForward
        from inflight.executor.products.coded import multiply_codes

        multiply_codes(network)
        forward = GpuNetworkForward(network, weights.layout, read_vocabulary_size(network))
        return _Chosen(forward, weight_dtype, {})
    expand_fp8(network, network.dtype)
    if expand_experts(network):
        log.info("quantized experts are expanded to %s", network.dtype)
    if weight_dtype == "quantized" and not is_quantized(network):
        weight_dtype = "dense"
    pack_linears(network)
    if weights.mixers:
        hybrid = HybridForward(network, weights.layout, weights.mixers, attention_layers(network))
        return _Chosen(hybrid, weight_dtype, {})
    return _Chosen(TransformersForward(network, weights.layout), weight_dtype, {})


def _with_codes_of_gpu(weights: _Weights) -> _Weights:
    """Expands what a GPU has dense: everything of several ranks, and what is rounded to FP8. Returns the weights with
    the type that they have then."""
    network, head, is_whole = weights.network, weights.network.get_output_embeddings(), weights.shard.num_ranks == 1

    def is_dense(layer: QuantizedLinear) -> bool:
        # The output layer is not multiplied in FP8.
        is_rounded = weights.weight_dtype == "fp8" and (layer is head or not is_fp8_of_rows(layer.weight))
        return is_rounded or not is_whole

    make_dense(network, network.dtype, is_dense)
    if not is_whole:
        expand_experts(network)
    return weights if is_whole or weights.weight_dtype != "quantized" else replace(weights, weight_dtype="dense")


def _gpu_forward(weights: _Weights, decoder: DecoderWeights, backend_name: str) -> _Chosen | str:
    """Returns the forward pass, or the reason why there is none for this model."""
    # They import triton, which only this backend needs.
    from inflight.executor.forward.gpu import GpuForward
    from inflight.executor.gpu.decoder import GpuDecoder, undivided_reason

    layout, shard = weights.layout, weights.shard
    if weights.weight_dtype == "fp8" and decoder.shape.num_experts:
        return "it has experts"
    of_shard = decoder
    if shard.num_ranks > 1:
        if obstacle := undivided_reason(decoder):
            return obstacle
        _check_divisible(decoder, shard)
        of_shard = divide(decoder, shard, layout.device)
    gpu = GpuDecoder(
        of_shard,
        layout.backend,
        read_context_length(weights.network),
        has_fp8_weights=weights.weight_dtype == "fp8",
        shard=shard,
    )
    same_on_all_ranks = _same_on_all_ranks(decoder, name_of(layout.device), shard)
    forward = GpuForward(gpu, layout, _open_flashinfer(weights, gpu, backend_name))
    return _Chosen(forward, weights.weight_dtype, same_on_all_ranks)


def _open_flashinfer(weights: _Weights, decoder: GpuDecoder | None, backend_name: str) -> FlashInfer | None:
    """Opens FlashInfer where the setting asks for it. Raises `ModelError` if it is named and cannot run."""
    if weights.shard.num_ranks > 1:
        return None  # ranks would choose by measurements of their own
    heads, layout = None, weights.layout
    # Its plans do not tell recurrent layers.
    if decoder is not None and decoder.recurrent_states is None:
        shape = decoder.shape
        heads = Heads(shape.num_heads, KvShape(shape.num_kv_heads, shape.head_dim), decoder.scorings)
    return open_flashinfer(backend_name, heads, layout.dtype, layout.layer_dtypes, layout.device, layout.backend)


def _native_forward(
    weights: _Weights, decoder: DecoderWeights, backend: CpuAttention, stream: WeightStream | None
) -> _Chosen | str:
    """Packs the model, or a shard of it, for the C++ code. The network cannot compute with quantized weights then.
    Returns the reason if there is no such forward pass for this model."""
    layout, shard = weights.layout, weights.shard
    if obstacle := unsupported_reason(decoder.shape):
        return obstacle
    if shard.num_ranks > 1 and (decoder.shape.dense_size or decoder.shape.shared_size):
        return "its feed-forward layers have several sizes"
    if shard.num_ranks > 1 and decoder.shape.activation == SQUARED_RELU:
        return "its feed-forward layers have no gates"
    _check_divisible(decoder, shard)
    same_on_all_ranks = _same_on_all_ranks(decoder, backend.library.instructions, shard)
    form = form_of(decoder, layout.dtype, weights.weight_dtype == "int8")
    stream = stream or stream_for(backend.library, backend.pool, form)
    choice = _choose_form(weights, decoder, backend, stream)
    if choice is not None:
        log.info("quantized weights are %s", choice)
        weights = replace(weights, weight_dtype=choice.form.value)
        form = replace(form, expands_quantized=choice.form is WeightForm.DENSE)
    form = replace(form, rounds_rows=weights.weight_dtype == WeightForm.ROUNDED_ROWS.value)
    native = NativeDecoder(backend.library, backend.pool, form, stream, shard)
    log.info("weights are read with %s", native.stream)
    native.pack(decoder, frees_quantized=True)
    return _Chosen(NativeForward(native, layout), weights.weight_dtype, same_on_all_ranks)


def _choose_form(
    weights: _Weights, decoder: DecoderWeights, backend: CpuAttention, stream: WeightStream
) -> FormChoice | None:
    """Returns the form of quantized weights; None if there is no choice."""
    layout = weights.layout
    # Ranks would choose by measurements of their own.
    if weights.sizes is None or weights.weight_dtype != "quantized" or weights.shard.num_ranks > 1:
        return None
    kv_bytes_per_token = layout.bytes_per_block(BLOCK_SIZE) // BLOCK_SIZE
    model = read_quantized(decoder, layout.dtype, kv_bytes_per_token, weights.length)
    if model is None:
        return None
    measure = measure_with(backend.library, backend.pool, stream)
    free_bytes = num_available_memory_bytes()
    return choose_form(model, weights.sizes, free_bytes, measure, may_round=weights.may_round)


def _lead(forward: Forward, group: WorkerGroup, description: ModelDescription) -> Forward:
    """Lets the other ranks join, and connects a shard with theirs."""
    group.join(description.hello(0))
    if isinstance(forward, NativeForward):
        return NativeRanks(forward, group)
    from inflight.executor.forward.gpu import GpuForward  # imports triton, which only this needs
    from inflight.executor.forward.gpu_ranks import GpuRanks

    assert isinstance(forward, GpuForward)
    return GpuRanks(forward, group)


def _check(
    forward: Forward, expectation: Expectation | None, description: ModelDescription, config: PretrainedConfig
) -> None:
    """Raises `ModelError` if a model yields other logits than transformers. Other ranks than the first expect none."""
    if expectation is None:
        return
    with _unsupported(config):
        _compare(forward, expectation, description)


def _compare(forward: Forward, expectation: Expectation, description: ModelDescription) -> None:
    layout, kv = forward.layout, forward.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    if forward.states is not None:
        forward.states.reserve(StateSizes(NUM_SLOTS, 0, 0))

    def logits(batch: StepBatch) -> Tensor:
        return forward.logits(batch, kv)

    if expectation.states is not None and isinstance(forward, SeparatesLayers):
        has_fp8 = description.weight_dtype == "fp8" or torch.float8_e4m3fn in layout.layer_dtypes
        tolerances = OF_FP8 if has_fp8 else OF_CODES
        if forward.routes_by_itself and layout.dtype != torch.float32:
            tolerances = tolerances.with_routing()
        separate = partial(forward.separate_layers, kv=kv)
        compare_layers(expectation, separate, logits, tolerances, has_slots=forward.states is not None)
        return
    compare(
        expectation,
        logits,
        layout.dtype,
        has_rounded_products=description.weight_dtype in ("int8", "quantized_a8"),
        quantized_kv=next((kv_dtype for kv_dtype in layout.layer_dtypes if kv_dtype != layout.dtype), None),
        routes_by_itself=forward.routes_by_itself,
    )


def _check_choice(choice: BackendChoice, kv_dtypes: Sequence[torch.dtype], device: torch.device) -> None:
    check_backend(kv_dtypes, choice.backend, device)
    if choice.is_fallback:
        log.warning("attention backend %s", choice.reason)


def _place(weight_dtype: str, dtype: torch.dtype, device: torch.device, shard: Shard) -> tuple[torch.device, float]:
    """Returns where a model is loaded, and which part of it is kept there (`load_network`)."""
    if is_gpu(device) and shard.num_ranks == 1:
        return device, 1.0
    bits = 8 * dtype.itemsize
    kept_share = ROUNDED_BITS.get(weight_dtype, bits) / bits / shard.num_ranks
    # The whole model need not fit in the memory of one rank's GPU.
    return (device if shard.num_ranks == 1 else torch.device("cpu")), kept_share


def _with_weights_of(network: PreTrainedModel, weight_dtype: str) -> str:
    """Expands or rounds the weights as `weight_dtype` asks for. Returns the type that they have then."""
    if weight_dtype == "dense":
        make_dense(network, network.dtype)
        expand_experts(network)
    if weight_dtype in AS_QUANTIZED and not is_quantized(network):
        raise ModelError(f"weight_dtype {weight_dtype} is for quantized checkpoints, and this one is not")
    if weight_dtype == "int4":
        log.info("%d linear layers are rounded to 4 bits, the output layer to 8", round_linears(network))
    return "quantized" if weight_dtype == "auto" and is_quantized(network) else weight_dtype


def _check_fp8_weights(network: PreTrainedModel) -> None:
    """Raises `ModelError` if the GPU of a network cannot multiply its dtype's rows in FP8."""
    check_fp8_device("weight_dtype", network.device)
    if is_gpu(network.device) and network.dtype != torch.bfloat16:
        raise ModelError("weight_dtype fp8 needs dtype bfloat16 on a GPU")


def _check_divisible(weights: DecoderWeights, shard: Shard) -> None:
    if reason := indivisible_reason(weights.shape, shard.num_ranks):
        raise ModelError(f"tensor_parallel_size={shard.num_ranks}: {reason}")


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


def _kv_dtypes(
    name: str, skip_layers: Sequence[int], dtype: torch.dtype, network: PreTrainedModel
) -> tuple[torch.dtype, ...]:
    """Returns the types of the KV. `skip_layers` count all layers, also those that are not attention and have none."""
    of_all = kv_dtypes(name, skip_layers, dtype, network.config.get_text_config(decoder=True).num_hidden_layers)
    return tuple(of_all[layer] for layer in attention_layers(network))


def _probe_layers(network: PreTrainedModel) -> tuple[Layer, ...]:
    register_attention()
    with quiet_transformers():
        network.set_attn_implementation(ATTENTION_NAME)
    probe = LayerProbe()
    token_ids = torch.zeros((1, 2), dtype=torch.long, device=network.device)
    with torch.inference_mode():
        network(input_ids=token_ids, use_cache=False, inflight_step=probe)
    return probe.layers(network.config.get_text_config(decoder=True), attention_layers(network))


def _choose_rope(network: PreTrainedModel, max_sequence_length: int) -> None:
    choice = fix_longrope(network, max_sequence_length)
    if choice is not None:
        log.info("longrope uses its %s", choice)


def _sequence_length(network: PreTrainedModel, max_sequence_length: int) -> int:
    """Returns the longest sequence that is accepted. Raises `ModelError` if the setting is above the context length."""
    with _unsupported(network.config):
        context_length = read_context_length(network)
    if max_sequence_length > context_length:
        raise ModelError(
            f"max_sequence_length={max_sequence_length} is above {context_length}, the context length that the model's "
            "configuration gives; 0 takes that"
        )
    return max_sequence_length or context_length
