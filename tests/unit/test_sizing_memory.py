"""The memory that `inflight size` predicts is that of a real executor, for each kind of checkpoint and weight type."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import MixtralConfig, Qwen3MoeConfig

from inflight.cli.main import main
from inflight.common.model_files.layer_sizes import BYTES_PER_NUMBER
from inflight.common.model_source import resolve_model
from inflight.common.settings import SettingError, load
from inflight.executor import loader as executor_loader
from inflight.executor.checkpoint.shards import WHOLE, Shard
from inflight.executor.cpu.decoder import NativeDecoder
from inflight.executor.formats.gguf_blocks import BLOCK_TYPES
from inflight.executor.forward.native import NativeForward
from inflight.executor.model.loader import load_model
from inflight.executor.settings import ExecutorSettings
from inflight.tools.sizing.arithmetic import GIBIBYTE, Machine, MemoryOptions, Pool, pool_of
from inflight.tools.sizing.model_shape import read_model_shape
from inflight.tools.sizing.weights import GGUF_CODES, Role, cpu_weight_bytes
from tests.property.test_hybrid_models import CONFIGS as HYBRIDS
from tests.property.test_native_hybrid import WITH_EXPERTS
from tests.support.checkpoints.quantized_checkpoints import (
    CONFIGS,
    WIDE,
    awq,
    awq_config,
    compressed,
    compressed_config,
    gptq,
    gptq_config,
    save_gguf,
    save_quantized,
)
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.device.torch_threads import torch_threads

# The first test of a build may wait for the compiler.
pytestmark = pytest.mark.timeout(600)

KINDS: Any = gguf.GGMLQuantizationType
GROUPS: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
ROWS: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "channel"}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "dense": lambda path: save_model(CONFIGS["llama"], path),
    "tied": lambda path: save_model(CONFIGS["qwen2"], path),
    "gguf": lambda path: save_gguf(path.with_suffix(".gguf"), "llama", [KINDS.Q4_K, KINDS.Q6_K, KINDS.Q8_0]),
    "tied gguf": lambda path: save_gguf(path.with_suffix(".gguf"), "qwen2", [KINDS.Q4_0]),
    "gptq": lambda path: save_quantized(path, "llama", gptq_config(4, 64), gptq(4, 64)),
    "gptq rows": lambda path: save_quantized(path, "llama", gptq_config(8, -1), gptq(8, -1)),
    "awq": lambda path: save_quantized(path, "llama", awq_config(64), awq(64)),
    "packed": lambda path: save_quantized(
        path, "llama", compressed_config("pack-quantized", **GROUPS), compressed("pack-quantized", **GROUPS)
    ),
    "int": lambda path: save_quantized(
        path, "llama", compressed_config("int-quantized", **ROWS), compressed("int-quantized", **ROWS)
    ),
    "fp8": lambda path: save_quantized(
        path, "llama", compressed_config("float-quantized", **FP8), compressed("float-quantized", **FP8)
    ),
    "mixtral": lambda path: save_model(MixtralConfig(**sizes(**WIDE, num_local_experts=4)), path),
    "qwen3-moe": lambda path: save_model(
        Qwen3MoeConfig(**sizes(**WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=384)), path
    ),
}
MAX_ADAPTER_RANK = 20


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def checkpoint(kind: str) -> str:
        if kind not in made:
            made[kind] = str(CHECKPOINTS[kind](tmp_path_factory.mktemp("models") / "model"))
        return made[kind]

    return checkpoint


def predicted(model: str, dtype: str, num_ranks: int = 1, **options: Any) -> Pool:
    machine = Machine(GIBIBYTE, False, 0.2, 0, MemoryOptions(**options))
    return pool_of(read_model_shape(model), machine, dtype, 16, num_ranks=num_ranks)


def head_padding(model: str, dtype: str, weight_dtype: str, num_ranks: int = 1) -> int:
    """Returns the memory by which the blocks of 32 tokens exceed a small vocabulary on the last rank. Whole blocks
    without a token are dense."""
    head = tuple(weight for weight in read_model_shape(model).weights if weight.role is Role.HEAD)
    hidden_size: int = CONFIGS["llama"].hidden_size
    num_tokens = sum(weight.number for weight in head) // hidden_size
    columns = Shard(num_ranks - 1, num_ranks).columns(num_tokens)
    own: int = columns.stop - columns.start
    with_tokens, padded = (-(-own // multiple) * multiple for multiple in (32, 128))
    each = cpu_weight_bytes(head, dtype, weight_dtype) / num_tokens
    dense = (padded - with_tokens) * hidden_size * BYTES_PER_NUMBER[dtype]
    return round((with_tokens - num_tokens / num_ranks) * each) + dense


def load_native(model: str, dtype: str, weight_dtype: str, shard: Shard = WHOLE) -> NativeDecoder:
    """Returns the forward pass of an executor, or of a rank."""
    with torch_threads(1):
        loaded = load_model(
            resolve_model(model), dtype_name=dtype, device_name="cpu", weight_dtype=weight_dtype, shard=shard
        )
    assert isinstance(loaded.forward, NativeForward)
    return loaded.forward.decoder


def loaded_bytes(native: NativeDecoder) -> int:
    """Returns the memory of the matrices and the embedding."""
    shape = native.form.shape
    columns = native.shard.columns(shape.hidden_size)
    embedding_bytes: int = shape.vocabulary_size * (columns.stop - columns.start) * native.form.dtype.itemsize
    return native.num_matrix_bytes + embedding_bytes


def test_every_type_of_gguf_is_known_with_its_form() -> None:
    assert {kind.name: (kind.bits, kind.group_size) for kind in BLOCK_TYPES.values()} == {
        name: (codes.bits, codes.group_size) for name, codes in GGUF_CODES.items()
    }


@pytest.mark.parametrize(
    ("kind", "weight_dtype", "dtype"),
    [
        *((kind, "auto", "bfloat16") for kind in CHECKPOINTS),
        *((kind, "auto", "float32") for kind in ("dense", "gguf", "tied gguf", "gptq")),
        ("gguf", "dense", "bfloat16"),
        ("gguf", "quantized_a8", "bfloat16"),
        ("awq", "int8", "bfloat16"),
        *((kind, "int8", "float32") for kind in ("dense", "qwen3-moe")),
        ("mixtral", "int8", "bfloat16"),
        *((kind, "int4", "bfloat16") for kind in ("dense", "mixtral")),
        ("dense", "int4", "float32"),
    ],
)
def test_weights_and_adapters_take_the_predicted_memory(
    kind: str, weight_dtype: str, dtype: str, checkpoints: Callable[[str], str]
) -> None:
    model = checkpoints(kind)
    pool = predicted(model, dtype, weight_dtype=weight_dtype, max_adapters=1, max_adapter_rank=MAX_ADAPTER_RANK)
    native = load_native(model, dtype, weight_dtype)
    # Norms and biases are predicted as well; blocks of columns and rows are padded.
    expected = pool.weight_bytes + head_padding(model, dtype, weight_dtype)
    assert expected == pytest.approx(loaded_bytes(native), rel=0.015)
    assert pool.adapter_bytes == native.adapter_slot_bytes(MAX_ADAPTER_RANK)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, "bfloat16") for kind in CHECKPOINTS), *((kind, "float32") for kind in ("dense", "gguf"))],
)
def test_a_rank_takes_the_predicted_memory(kind: str, dtype: str, checkpoints: Callable[[str], str]) -> None:
    model = checkpoints(kind)
    pool = predicted(model, dtype, num_ranks=2, max_adapters=1, max_adapter_rank=MAX_ADAPTER_RANK)
    native = load_native(model, dtype, "auto", Shard(1, 2))
    expected = pool.weight_bytes + head_padding(model, dtype, "auto", 2)
    assert expected == pytest.approx(loaded_bytes(native), rel=0.015)
    assert pool.adapter_bytes == native.adapter_slot_bytes(MAX_ADAPTER_RANK)


@pytest.mark.parametrize("name", ["lfm2-native", "lfm2_moe", "qwen3_5-native"])
def test_adapters_of_models_with_recurrent_layers_take_the_predicted_memory(name: str, tmp_path: Path) -> None:
    model = str(save_model((HYBRIDS | WITH_EXPERTS)[name], tmp_path / name))
    pool = predicted(model, "float32", max_adapters=1, max_adapter_rank=MAX_ADAPTER_RANK)
    assert pool.adapter_bytes == load_native(model, "float32", "auto").adapter_slot_bytes(MAX_ADAPTER_RANK)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_adapters_and_the_host_tier_take_the_predicted_memory(
    dtype: str, checkpoints: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, free_bytes, host_bytes = checkpoints("dense"), 300_000_000, 3_000_000
    monkeypatch.setattr(executor_loader, "num_available_memory_bytes", lambda: free_bytes)
    flags = ["--model", model, "--dtype", dtype, "--device", "cpu", "--adapter-folder", str(tmp_path)]
    flags += ["--max-adapters", "3", "--max-adapter-rank", "20", "--kv-cache-host-memory-bytes", str(host_bytes)]
    with torch_threads(1):
        loaded = executor_loader.load_executor(load(ExecutorSettings, "inflight executor", flags))
    assert isinstance(loaded.model.forward, NativeForward)
    pool = predicted(model, dtype, max_adapters=3, max_adapter_rank=20, kv_cache_host_memory_bytes=host_bytes)
    assert pool.adapter_bytes == 3 * loaded.model.forward.decoder.adapter_slot_bytes(20)
    assert pool.num_host_blocks == loaded.limits.num_host_blocks > 0


@pytest.mark.parametrize("kind", ["dense", "gptq", "packed"])
def test_a_configuration_alone_predicts_nearly_the_same(
    kind: str, checkpoints: Callable[[str], str], tmp_path: Path
) -> None:
    whole = checkpoints(kind)
    config = tmp_path / "config.json"
    config.write_text((Path(whole) / "config.json").read_text())
    alone, counted = (predicted(model, "bfloat16").weight_bytes for model in (str(config), whole))
    assert alone == pytest.approx(counted, rel=0.05)


def test_the_command_counts_adapters_in_the_pool(capsys: pytest.CaptureFixture[str]) -> None:
    sizings = []
    for flags in ([], ["--max-adapters", "8", "--weight-dtype", "dense"]):
        assert main(["size", "--json", "--memory-gib", "2", *flags]) == 0
        sizings.append(json.loads(capsys.readouterr().out))
    plain, adapted = (sizing["pool"] for sizing in sizings)
    assert adapted["weight_bytes"] > 1.5 * plain["weight_bytes"]
    assert plain["adapter_bytes"] == 0 < adapted["adapter_bytes"]
    more_bytes = sum(adapted[name] - plain[name] for name in ("weight_bytes", "adapter_bytes"))
    lost = 0.2 * more_bytes / plain["bytes_per_block"]
    assert plain["num_blocks"] - adapted["num_blocks"] == pytest.approx(lost, abs=2)
    flags = sizings[1]["executor_flags"]
    assert flags[flags.index("--max-adapters") + 1] == "8"
    assert flags[flags.index("--weight-dtype") + 1] == "dense"


@pytest.mark.parametrize(
    ("options", "num_ranks", "is_gpu", "said"),
    [
        ({"max_adapters": 1}, 2, True, "--max-adapters does not go with --tensor-parallel-size on GPUs"),
        ({"weight_dtype": "fp8"}, 2, True, "--weight-dtype fp8 does not go with --tensor-parallel-size"),
        ({"kv_cache_dtype": "fp8"}, 2, True, "--kv-cache-dtype fp8 does not go with --tensor-parallel-size"),
        ({"kv_cache_host_memory_bytes": 1}, 2, True, "--kv-cache-host-memory-bytes does not go with"),
        ({"weight_dtype": "int8"}, 1, True, "needs a CPU"),
        ({"weight_dtype": "quantized"}, 1, False, "--weight-dtype quantized is for quantized checkpoints"),
        ({"weight_dtype": "fp8"}, 1, False, "--weight-dtype fp8 needs a GPU"),
        ({"kv_cache_dtype": "fp8"}, 1, False, "--kv-cache-dtype fp8 needs a GPU"),
        ({"kv_cache_dtype": "int8"}, 1, True, "--kv-cache-dtype int8 needs a CPU"),
        ({"kv_cache_host_memory_bytes": 2 * GIBIBYTE}, 1, False, "kv_cache_host_memory_bytes"),
    ],
)
def test_what_executors_refuse_is_refused(
    options: dict[str, Any], num_ranks: int, is_gpu: bool, said: str, checkpoints: Callable[[str], str]
) -> None:
    machine = Machine(GIBIBYTE, is_gpu, 0.2, 0, MemoryOptions(**options))
    with pytest.raises(SettingError, match=said):
        pool_of(read_model_shape(checkpoints("dense")), machine, "bfloat16", 16, num_ranks=num_ranks)


def test_each_gpu_has_a_part_of_the_weights_and_of_the_kv(checkpoints: Callable[[str], str]) -> None:
    shape, gpu = read_model_shape(checkpoints("dense")), Machine(GIBIBYTE, is_gpu=True, fraction=0.9, working_bytes=0)
    one, two = (pool_of(shape, gpu, "bfloat16", 16, num_ranks=num_ranks) for num_ranks in (1, 2))
    assert 2 * two.bytes_per_token == one.bytes_per_token
    # A tied embedding has a copy.
    assert two.weight_bytes == sum(weight.number for weight in shape.weights)
    assert one.weight_bytes <= 2 * two.weight_bytes


def test_int8_kv_takes_the_predicted_memory(checkpoints: Callable[[str], str]) -> None:
    model = checkpoints("dense")
    with torch_threads(1):
        layout = load_model(resolve_model(model), device_name="cpu", kv_cache_dtype="int8").forward.layout
    assert predicted(model, "float32", kv_cache_dtype="int8").bytes_per_block == layout.bytes_per_block(16)


def test_fp8_of_llama_3_8b_is_counted_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "vocab_size": 128_256, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14_336, "max_position_embeddings": 8192,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert main(["size", "--json", "--model", str(file), "--weight-dtype", "fp8", "--kv-cache-dtype", "fp8"]) == 0
    sizing = json.loads(capsys.readouterr().out)
    each_layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14_336)
    rows = 4096 + 2 * 1024 + 4096 + 2 * 14_336 + 4096
    others = 2 * 128_256 * 4096 + 65 * 4096
    assert sizing["pool"]["weight_bytes"] == 32 * (each_layer + 4 * rows) + 2 * others
    assert sizing["pool"]["bytes_per_token"] == 2 * 32 * 8 * (128 + 4)
    assert "--weight-dtype fp8 --kv-cache-dtype fp8" in shlex.join(sizing["executor_flags"])


def test_a_quantized_checkpoint_is_not_rounded(checkpoints: Callable[[str], str]) -> None:
    with pytest.raises(SettingError, match="int4 is for models that are not quantized"):
        predicted(checkpoints("gptq"), "bfloat16", weight_dtype="int4")


def test_weights_stay_quantized_by_default_and_where_that_is_set(checkpoints: Callable[[str], str]) -> None:
    by_default, as_set = (
        predicted(checkpoints("gptq"), "bfloat16", weight_dtype=kind) for kind in ("auto", "quantized")
    )
    assert by_default.weight_bytes == as_set.weight_bytes


LLAMA_3_70B = {
    "vocab_size": 128_256, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 28_672, "max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize(
    ("quantization", "bytes_each"),
    [
        # A scale of 2 bytes and a zero of one for each group.
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 0.5 + 3 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, 0.5 + 3 / 64),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5 + 1 / 16),
    ],
)
def test_llama_3_70b_in_4_bits_fits_a_gpu_of_80_gb(
    quantization: dict[str, Any], bytes_each: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_3_70B | {"quantization_config": quantization}))
    assert main(["size", "--json", "--model", str(file), "--gpu", "h100-80gb"]) == 0
    pool = json.loads(capsys.readouterr().out)["pool"]
    matrices = 80 * 8192 * (2 * 8192 + 2 * 1024 + 3 * 28_672)
    others = 2 * 128_256 * 8192 + 161 * 8192
    # NVFP4 has a factor for each row besides.
    assert pool["weight_bytes"] == pytest.approx(matrices * bytes_each + 2 * others, rel=1e-3)
    assert pool["num_blocks"] > 5000
    assert main(["size", "--json", "--model", str(file), "--gpu", "h100-80gb", "--weight-dtype", "dense"]) != 0


QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "max_position_embeddings": 40_960,
}  # fmt: skip


@pytest.mark.parametrize(
    ("quantization", "bits_each"),
    # A scale of 16 bits for each 128 numbers of a row, and of 8 for each 32.
    [({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 16 / 128), ({"quant_method": "mxfp4"}, 4 + 8 / 32)],
)
def test_quantized_experts_take_their_bits_on_a_cpu(
    quantization: dict[str, Any], bits_each: float, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN3_30B_A3B | {"quantization_config": quantization}))
    experts = 48 * 128 * 3 * 2048 * 768
    others = 2 * (2 * 151_936 * 2048 + 48 * 2 * 2048 * (4096 + 512) * (0.5 if bits_each > 8 else 1))
    pool = pool_of(read_model_shape(str(file)), Machine(1 << 40, False, 0.2, 0), "bfloat16", 16)
    assert pool.weight_bytes == pytest.approx(experts * bits_each / 8 + others, rel=0.01)


def test_fp8_in_blocks_takes_half_of_bfloat16_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    file.write_text(json.dumps(LLAMA_3_70B | {"quantization_config": quantization}))
    assert main(["size", "--json", "--model", str(file), "--gpu", "h200-141gb"]) == 0
    weight_bytes = json.loads(capsys.readouterr().out)["pool"]["weight_bytes"]
    matrices = 80 * 8192 * (2 * 8192 + 2 * 1024 + 3 * 28_672)
    assert weight_bytes == pytest.approx(matrices * (1 + 4 / 128**2) + 4 * 128_256 * 8192, rel=1e-4)
