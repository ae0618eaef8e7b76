"""Shards of a model in one process: together they compute every bit of what the whole model computes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from inflight.common.kv_size import numbers_of_ranks
from inflight.common.model_files.layer_sizes import LayerSizes
from inflight.executor.adapters.weights import AdapterLimits, AdapterMatrix, AdapterWeights
from inflight.executor.attention.backend import KvShape, LayerKv
from inflight.executor.attention.cpu import CpuAttention
from inflight.executor.attention.transformers_hook import ATTENTION_NAME, LayerProbe, register_attention
from inflight.executor.checkpoint.decoder_weights import DecoderWeights, read_decoder
from inflight.executor.checkpoint.shards import WHOLE, Shard, digest_of, indivisible_reason
from inflight.executor.cpu.decoder import ALL_GATHER, ExchangeError, NativeDecoder, form_of
from inflight.executor.cpu.streams import DEFAULT_STREAM
from inflight.executor.native.library import NativeLibrary, load_native
from inflight.executor.native.pool import NativePool
from inflight.executor.recurrent.network import attention_layers, replace_recurrent_layers
from inflight.executor.step.batch import StepBatch
from inflight.tools.sizing.adapters import cpu_adapter_slot_bytes
from tests.support.checkpoints.adapter_files import SHAPE
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE, save_model, sizes
from tests.support.device.paged_cases import PagedCase, Spec, make_case

pytestmark = pytest.mark.timeout(600)

FOUR = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 144, "intermediate_size": 200}
FAMILY: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**sizes(**FOUR, attention_bias=True)),
    "llama-empty-parts": LlamaConfig(**sizes(num_key_value_heads=4)),
    "qwen2": Qwen2Config(**sizes(**FOUR)),
    "qwen3": Qwen3Config(**sizes(**FOUR)),
    "gemma2": Gemma2Config(**sizes(**FOUR), query_pre_attn_scalar=16, sliding_window=8),
    "gemma3": Gemma3TextConfig(**sizes(**FOUR), query_pre_attn_scalar=16, sliding_window=8),
    "granite": GraniteConfig(**sizes(**FOUR), residual_multiplier=0.22, embedding_multiplier=3.0, logits_scaling=2.0),
    "phi3": Phi3Config(**sizes(**FOUR)),
    # Of four ranks two have the same KV head, or all.
    "llama-shared-kv": LlamaConfig(**sizes(**FOUR | {"num_key_value_heads": 2}, attention_bias=True)),
    "phi3-one-kv-head": Phi3Config(**sizes(**FOUR | {"num_key_value_heads": 1})),
    "olmo2": Olmo2Config(**sizes(**FOUR)),
    "olmo2-shared-kv": Olmo2Config(**sizes(**FOUR | {"num_key_value_heads": 2})),
    "mixtral": MixtralConfig(**sizes(**FOUR, num_local_experts=4, num_experts_per_tok=2)),
    # Some ranks have no column of an expert.
    "qwen3-moe": Qwen3MoeConfig(**sizes(**FOUR, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=80)),
}
# Every family, and every type of number.
CASES = [
    *((family, "bfloat16") for family in FAMILY),
    *(("llama", kind) for kind in ("float32", "int8 weights", "int8 KV")),
    ("llama-empty-parts", "int8 weights"),
    ("llama-shared-kv", "int8 KV"),
    ("olmo2", "int8 weights"),
    *((family, kind) for family in ("mixtral", "qwen3-moe") for kind in ("float32", "int8 weights")),
]
ADAPTED_CASES = [
    ("llama", "bfloat16"),
    ("llama", "int8 weights"),
    ("llama-shared-kv", "float32"),
    ("llama-empty-parts", "bfloat16"),
    ("qwen3-moe", "int8 weights"),
]
SPECS = [Spec(1, 1), Spec(1, 37), Spec(9, 30), Spec(5, 5), Spec(70, 70)]


class Meeting:
    """Exchange between ranks that are threads of this process."""

    def __init__(self, num_ranks: int, fails_at: int | None = None) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=60)
        self._parts: dict[int, bytes] = {}
        self._num_ranks, self._fails_at = num_ranks, fails_at
        self.num_calls = 0

    def of(self, rank: int) -> Callable[[int, int], int]:
        def all_gather(address: int, num_bytes: int) -> int:
            self._parts[rank] = ctypes.string_at(address + rank * num_bytes, num_bytes)
            self.num_calls += rank == 0
            self._barrier.wait()
            if self._fails_at is not None and self.num_calls == self._fails_at:
                return 1
            for other in range(self._num_ranks):
                ctypes.memmove(address + other * num_bytes, self._parts[other], num_bytes)
            self._barrier.wait()
            return 0

        return all_gather


def read(folder: Path, dtype: torch.dtype) -> DecoderWeights:
    network: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype).eval()
    replace_recurrent_layers(network)
    register_attention()
    network.set_attn_implementation(ATTENTION_NAME)
    probe = LayerProbe()
    with torch.inference_mode():
        network(input_ids=torch.zeros((1, 2), dtype=torch.long), use_cache=False, inflight_step=probe)
    weights = read_decoder(
        network, probe.layers(network.config.get_text_config(decoder=True), attention_layers(network))
    )
    assert isinstance(weights, DecoderWeights), weights
    return weights


class Ranks:
    """The shards of a model, each with its own KV and a thread of this process."""

    def __init__(self, weights: DecoderWeights, dtype: torch.dtype, num_ranks: int, *, has_int8: bool = False) -> None:
        library = load_native()
        assert isinstance(library, NativeLibrary)
        self.meeting = Meeting(num_ranks)
        self._threads = ThreadPoolExecutor(num_ranks)
        self._dtype = dtype
        self._backends = [CpuAttention(library, NativePool(library, 1)) for _ in range(num_ranks)]
        self.decoders = []
        for rank, backend in enumerate(self._backends):
            shard = Shard(rank, num_ranks) if num_ranks > 1 else WHOLE
            form = form_of(weights, dtype, has_int8)
            decoder = NativeDecoder(library, backend.pool, form, DEFAULT_STREAM, shard)
            decoder.all_gather = ALL_GATHER(self.meeting.of(rank)) if num_ranks > 1 else None
            decoder.pack(weights)
            self.decoders.append(decoder)

    def allocate(self, num_blocks: int, block_size: int, kv_dtype: torch.dtype) -> None:
        shape = self.decoders[0].form.shape
        part = KvShape(self.decoders[0].shard.num_kv_heads(shape.num_kv_heads), shape.head_dim)
        device = torch.device("cpu")
        self.kv: list[tuple[LayerKv, ...]] = [
            tuple(backend.allocate(part, num_blocks + 1, block_size, kv_dtype, device) for _ in range(shape.num_layers))
            for backend in self._backends
        ]

    def logits(self, batch: StepBatch) -> Tensor:
        return torch.cat(self._each(lambda rank: self.decoders[rank].logits(batch, self.kv[rank])), 1)

    def largest(self, batch: StepBatch) -> Sequence[tuple[Tensor, Tensor]]:
        return self._each(lambda rank: self.decoders[rank].largest(batch, self.kv[rank]))

    def _each(self, work: Callable[[int], Any]) -> list[Any]:
        return list(self._threads.map(work, range(len(self.decoders))))


def filled_case() -> PagedCase:
    case = make_case(SPECS, 16)
    generator = torch.Generator().manual_seed(5)
    for batch in (case.history, case.batch):
        batch.token_ids.copy_(torch.randint(VOCABULARY_SIZE, batch.token_ids.shape, generator=generator))
    return case


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_shards_compute_every_bit_of_the_whole(tmp_path: Path, family: str, kind: str) -> None:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    weights = read(save_model(FAMILY[family], tmp_path / "tiny", has_random_vectors=True), dtype)
    case = filled_case()

    logits, largest = [], []
    for num_ranks in (1, 2, 4):
        ranks = Ranks(weights, dtype, num_ranks, has_int8=kind == "int8 weights")
        ranks.allocate(case.num_blocks, 16, torch.int8 if kind == "int8 KV" else dtype)
        ranks.logits(case.history)
        logits.append(ranks.logits(case.batch))
        largest.append(ranks.largest(case.batch))
        # The last layer leaves out rows without logits, and ends early in a step that has none
        of_all_rows = ranks.logits(replace(case.batch, logit_rows=torch.arange(case.batch.num_tokens)))
        assert torch.equal(of_all_rows[case.batch.logit_rows], logits[-1])
        assert len(ranks.logits(replace(case.batch, logit_rows=torch.zeros(0, dtype=torch.int64)))) == 0

    assert torch.equal(logits[1], logits[0])
    assert torch.equal(logits[2], logits[0])
    for of_ranks in largest:
        assert torch.equal(torch.stack([values for values, _ in of_ranks]).max(0).values, logits[0].max(-1).values)


@pytest.mark.parametrize(("family", "kind"), ADAPTED_CASES)
def test_shards_of_adapters_compute_every_bit_of_the_whole(tmp_path: Path, family: str, kind: str) -> None:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    weights = read(save_model(FAMILY[family], tmp_path / "tiny", has_random_vectors=True), dtype)
    limits = AdapterLimits(weights.shape, 8)
    adapters = [random_adapter(limits, rank, seed) for seed, rank in enumerate((8, 3, 5))]
    case = filled_case()
    batch = replace(case.batch, adapter_slots=torch.tensor([0, -1, 1, 2, 1], dtype=torch.int32))

    base, logits = [], []
    for num_ranks in (1, 2, 4):
        ranks = Ranks(weights, dtype, num_ranks, has_int8=kind == "int8 weights")
        ranks.allocate(case.num_blocks, 16, dtype)
        for decoder in ranks.decoders:
            decoder.reserve_adapters(len(adapters), limits.max_rank)
            for slot, adapter in enumerate(adapters):
                decoder.load_adapter(slot, adapter)
        ranks.logits(case.history)
        logits.append(ranks.logits(batch))
        base.append(ranks.logits(case.batch))

    assert torch.equal(logits[1], logits[0])
    assert torch.equal(logits[2], logits[0])
    assert torch.equal(base[2], base[0])
    is_changed = (logits[0] != base[0]).any(-1)
    assert is_changed.tolist() == [slot >= 0 for slot in [0, -1, 1, 2, 1]]


@pytest.mark.parametrize("family", ["llama", "llama-shared-kv", "llama-empty-parts"])
def test_adapter_slots_of_a_rank_take_the_predicted_memory(tmp_path: Path, family: str) -> None:
    weights = read(save_model(FAMILY[family], tmp_path / "tiny"), torch.bfloat16)
    shape = weights.shape
    dim = shape.head_dim
    sizes = LayerSizes(
        shape.hidden_size, shape.num_heads * dim, shape.num_kv_heads * dim, inner=shape.intermediate_size
    )
    for num_ranks in (1, 2, 4):
        decoder = Ranks(weights, torch.bfloat16, num_ranks).decoders[0]
        outputs = sizes.of_rank(num_ranks, decoder.shard.num_kv_heads(shape.num_kv_heads) * dim)
        expected = cpu_adapter_slot_bytes(
            shape.num_layers, sizes, outputs, 20, "bfloat16", has_experts=shape.num_experts > 0
        )
        assert decoder.adapter_slot_bytes(20) == expected


def random_adapter(limits: AdapterLimits, rank: int, seed: int) -> AdapterWeights:
    """An adapter of all projections that may have one."""
    generator = torch.Generator().manual_seed(seed)
    matrices = {
        name: AdapterMatrix(
            torch.randn(rank, inputs, generator=generator) / inputs**0.5,
            torch.randn(outputs, rank, generator=generator) / rank**0.5,
            0.5,
        )
        for name, (outputs, inputs) in limits.modules()
    }
    return AdapterWeights(
        tuple(
            tuple(None if name is None else matrices[name] for name in limits.names(layer))
            for layer in range(limits.shape.num_layers)
        )
    )


def test_failed_exchange_ends_the_step_with_an_error(tmp_path: Path) -> None:
    weights = read(save_model(FAMILY["llama"], tmp_path / "tiny"), torch.float32)
    case = filled_case()
    ranks = Ranks(weights, torch.float32, 2)
    ranks.allocate(case.num_blocks, 16, torch.float32)
    ranks.logits(case.history)
    ranks.meeting._fails_at = ranks.meeting.num_calls + 3

    with pytest.raises(ExchangeError):
        ranks.logits(case.batch)


def test_refusal_names_the_sizes_that_work() -> None:
    shape = replace(SHAPE, num_heads=9, num_kv_heads=3)
    assert [indivisible_reason(shape, num_ranks) for num_ranks in (1, 3, 9)] == [None] * 3
    assert indivisible_reason(shape, 2) == ("9 heads and 3 KV heads cannot be divided by 2; sizes that work: 1, 3, 9")


def test_numbers_of_ranks_give_each_the_kv_heads_of_its_query_heads() -> None:
    assert numbers_of_ranks(12, 4) == [1, 2, 4, 12]
    assert numbers_of_ranks(12, 6) == [1, 2, 3, 6, 12]
    for num_heads, num_kv_heads in ((12, 4), (12, 6), (9, 3), (8, 1), (8, 8)):
        shape = replace(SHAPE, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=1)
        for num_ranks in numbers_of_ranks(num_heads, num_kv_heads):
            found: list[int] = []
            for rank in range(num_ranks):
                queries, keys, values, *_ = Shard(rank, num_ranks).outputs(shape)
                needed = {head * num_kv_heads // num_heads for head in range(queries.start, queries.stop)}
                assert needed == set(range(keys.start, keys.stop)) == set(range(values.start, values.stop))
                found += range(queries.start, queries.stop)
            assert found == list(range(num_heads))


def test_digest_tells_models_of_one_configuration_apart(tmp_path: Path) -> None:
    first, again, other = (
        read(save_model(FAMILY["llama"], tmp_path / name, seed), torch.float32)
        for name, seed in (("first", 0), ("again", 0), ("other", 1))
    )
    assert digest_of(first) == digest_of(again) != digest_of(other)
    changed = replace(first, final_norm=first.final_norm.flip(0) + torch.arange(first.shape.hidden_size))
    assert digest_of(changed) != digest_of(first)
