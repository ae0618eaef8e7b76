"""`inflight size`: its arithmetic, its reading of models, and that its blocks are those of a real executor."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig

from inflight.bench.fleet.tiny_model import write_tiny_model
from inflight.cli.main import main
from inflight.common.model_files.layer_sizes import LayerSizes
from inflight.common.model_source import ModelError
from inflight.common.settings import SettingError, load
from inflight.executor import loader as executor_loader
from inflight.executor.settings import ExecutorSettings
from inflight.tools.sizing.arithmetic import (
    GIBIBYTE,
    Machine,
    MemoryOptions,
    Speed,
    Steps,
    Traffic,
    demand_of,
    pool_of,
    seats_at_max_utilization,
    seats_without_eviction,
)
from inflight.tools.sizing.model_shape import ModelShape, read_model_shape
from inflight.tools.sizing.report import better_policy
from inflight.v1 import inference_pb2
from tests.property.test_hybrid_models import CONFIGS as HYBRID_CONFIGS
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.device.torch_threads import torch_threads
from tests.support.scheduler.scheduling import BLOCK_SIZE, LIMITS, make_scheduler, make_sequence, step
from tests.unit.scripted_router import ScriptedRouter, serving

LLAMA_3_8B = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
EIGHT_B = ModelShape("llama", 32, 8, 128, 8192, 8_030_261_248, True)
H100 = Machine(81_559 << 20, True, 0.9, 2 * GIBIBYTE)


def traffic(requests_per_s: float | None = 10.0, max_tokens: int = 600) -> Traffic:
    return Traffic(requests_per_s, 500, 1200, 200, 600, max_tokens)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B))
    return path


# --- arithmetic


def test_a_pool_is_the_fraction_of_what_weights_and_steps_leave() -> None:
    pool = pool_of(EIGHT_B, H100, "bfloat16", 16)
    assert pool.bytes_per_token == 131_072
    assert pool.weight_bytes == 16_060_522_496
    free = H100.memory_bytes - pool.weight_bytes - 2 * GIBIBYTE
    assert pool.num_blocks == int(free // (16 * 131_072) * 0.9)
    assert pool_of(EIGHT_B, H100, "bfloat16", 16, 64_000).num_blocks == 4000


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(SettingError, match="no block"):
        pool_of(EIGHT_B, Machine(8 * GIBIBYTE, True, 0.9, 0), "bfloat16", 16)


def test_heads_are_kept_in_whole_vectors_on_a_cpu() -> None:
    odd = ModelShape("odd", 2, 2, 10, 256, 1000, True)
    on_cpu, on_gpu = (pool_of(odd, Machine(GIBIBYTE, gpu, 0.2, 0), "float32", 16) for gpu in (False, True))
    assert (on_cpu.bytes_per_token, on_gpu.bytes_per_token) == (2 * 2 * 2 * 16 * 4, 2 * 2 * 2 * 10 * 4)


def test_each_rank_has_a_part_of_weights_and_kv_in_memory_of_its_own() -> None:
    machine = Machine(16 * GIBIBYTE, False, 0.2, 0)
    one, four = (pool_of(EIGHT_B, machine, "bfloat16", 16, num_ranks=n) for n in (1, 4))
    assert (four.weight_bytes, four.bytes_per_block) == (one.weight_bytes // 4, one.bytes_per_block // 4)
    assert four.num_blocks == int((machine.memory_bytes - four.weight_bytes) // four.bytes_per_block * 0.2)


def test_ranks_above_the_kv_heads_have_one_each() -> None:
    shape = replace(EIGHT_B, num_kv_heads=2, sizes=LayerSizes(4096, 4096, 256, 14336))
    machine = Machine(16 * GIBIBYTE, False, 0.2, 0)
    two, eight = (pool_of(shape, machine, "bfloat16", 16, num_ranks=n) for n in (2, 8))
    assert two.bytes_per_token == eight.bytes_per_token


def test_ranks_that_do_not_divide_the_kv_heads_are_refused_with_sizes_that_work() -> None:
    with pytest.raises(SettingError, match="8 KV heads cannot be divided by 3 ranks; sizes that work: 1, 2, 4, 8"):
        pool_of(EIGHT_B, H100, "bfloat16", 16, num_ranks=3)


def test_seats_are_what_each_policy_reserves() -> None:
    free = seats_without_eviction(1000, 16, traffic(max_tokens=2000))
    assert (free.blocks_mean, free.seats_mean) == (157, 6)
    assert (free.blocks_p95, free.seats_p95) == (200, 5)
    full = seats_at_max_utilization(1000, 16, traffic(max_tokens=2000))
    assert (full.blocks_mean, full.seats_mean) == (69, 14)
    assert better_policy(free, full, wanted=32) == "max_utilization"
    assert better_policy(free, full, wanted=6) == "guaranteed_no_evict"


@pytest.mark.parametrize("num_blocks", [9, 10, 16, 19, 20, 28, 33])
def test_seats_with_shared_prompts_are_those_of_a_scheduler(num_blocks: int) -> None:
    scheduler = make_scheduler(replace(LIMITS, max_num_sequences=8, max_num_tokens=64), num_blocks=num_blocks)
    num_accepted = 0
    while scheduler.offer(make_sequence(str(num_accepted), [*range(24), num_accepted], max_tokens=12)) is None:
        step(scheduler)
        num_accepted += 1
    asked = Traffic(None, 25, 25, 12, 12, max_tokens=12, shared_prompt_tokens=24)
    assert seats_without_eviction(num_blocks, BLOCK_SIZE, asked).seats_mean == num_accepted


def test_shared_prompts_are_neither_reserved_nor_computed_again() -> None:
    asked = Traffic(10.0, 3000, 3200, 200, 600, max_tokens=600, shared_prompt_tokens=2500)
    held = seats_without_eviction(1000, 16, asked)
    # 225 and 238 blocks, of which 156 are shared
    assert (held.blocks_mean, held.seats_mean) == (69, (1000 - 2 * 156) // 69)
    assert (held.blocks_p95, held.seats_p95) == (82, (1000 - 2 * 156) // 82)
    demand = demand_of(asked, Speed(step_ms=20.0, max_num_tokens=1024), seats_per_replica=12, tokens_per_block=16)
    assert demand is not None
    assert demand.ttft_ms == 20.0
    # The last token of a prompt is always computed.
    alike = replace(asked, prompt_tokens=3200, shared_prompt_tokens=3200)
    assert alike.num_shared_blocks(16) == 199
    with pytest.raises(SettingError, match="the 3201 shared tokens are more than the 3200 of a prompt"):
        replace(alike, shared_prompt_tokens=3201)
    with pytest.raises(SettingError, match="the 3200 shared tokens are more than the 3100 of a prompt"):
        replace(alike, prompt_tokens_p95=3100)


def test_seats_needed_follow_from_littles_law() -> None:
    demand = demand_of(
        traffic(10.0), Speed(step_ms=20.0, max_num_tokens=1024), seats_per_replica=32, tokens_per_block=16
    )
    assert demand is not None
    assert demand.seat_time_s == pytest.approx(4.0)  # a step for the prompt and the first token, 199 more
    assert demand.seats_busy == pytest.approx(40.0)
    assert demand.seats_needed == 51  # 40 + 1.645 × √40
    assert demand.replicas == 2
    assert demand.output_tokens_per_s == 2000
    assert demand.ttft_ms == 20.0
    assert demand_of(traffic(None), Speed(20.0, 1024), 32, 16) is None


# --- models


def test_a_configuration_alone_gives_the_weights_of_a_llama(config_file: Path) -> None:
    shape = read_model_shape(str(config_file))
    assert shape.num_parameters == 8_030_261_248, "as published for Llama 3 8B"
    assert not shape.counted
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (32, 8, 128)


def test_weights_that_are_there_are_counted(tmp_path: Path) -> None:
    shape = read_model_shape(str(write_tiny_model(tmp_path)))
    assert shape.counted
    assert shape.name == "tiny"
    (tmp_path / "tiny" / "model.safetensors").unlink()
    assert read_model_shape(str(tmp_path / "tiny")).num_parameters == shape.num_parameters


def test_a_gguf_file_is_read_without_its_tensors() -> None:
    shape = read_model_shape("")
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (30, 3, 64)
    assert (shape.num_parameters, shape.context_length) == (134_515_008, 8192)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + struct.pack("<IQQ", 3, 1, 1), b"nothing at all"])
def test_a_broken_gguf_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"m\.gguf is not a GGUF file"):
        read_model_shape(str(tmp_path / "m.gguf"))


def test_what_is_no_model_is_named(tmp_path: Path, config_file: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        read_model_shape("/nowhere/at/all")
    config_file.write_text('{"num_attention_heads": 4, "hidden_size": 64}')
    with pytest.raises(ModelError, match="does not say num_hidden_layers"):
        read_model_shape(str(config_file))


# --- against an executor


@pytest.mark.parametrize(
    ("name", "dtype"), [pytest.param("", "bfloat16", marks=pytest.mark.slow), ("tiny", "bfloat16"), ("tiny", "float32")]
)
def test_its_blocks_are_those_of_a_real_executor(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is said to be 300 MB for both: an executor sees it after its weights are loaded, the calculator before."""
    model = str(write_tiny_model(tmp_path)) if name else ""
    free_bytes = 300_000_000
    monkeypatch.setattr(executor_loader, "num_available_memory_bytes", lambda: free_bytes)
    flags = ["--model", model, "--dtype", dtype, "--device", "cpu", "--listen", "127.0.0.1:0", "--num-threads", "1"]
    with torch_threads(1):
        loaded = executor_loader.load_executor(load(ExecutorSettings, "inflight executor", flags))

    shape = read_model_shape(model)
    weight_bytes = pool_of(shape, Machine(GIBIBYTE, False, 0.2, 0), dtype, 16).weight_bytes
    pool = pool_of(shape, Machine(free_bytes + weight_bytes, False, 0.2, 0), dtype, 16)
    assert pool.bytes_per_block == loaded.model.forward.layout.bytes_per_block(16)
    assert pool.num_blocks == loaded.num_blocks


@pytest.mark.parametrize("max_tokens", [0, 20_000])
def test_its_window_groups_are_those_of_a_real_executor(
    max_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Gemma3TextConfig(**sizes(num_hidden_layers=7, sliding_window=32, max_position_embeddings=2048))
    model = str(save_model(config, tmp_path / "gemma"))
    monkeypatch.setattr(executor_loader, "num_available_memory_bytes", lambda: 500_000_000)
    flags = ["--model", model, "--dtype", "float32", "--device", "cpu", "--num-threads", "1"]
    flags += ["--max-num-sequences", "12", "--max-num-tokens", "256", "--max-tokens-in-paged-kv-cache", str(max_tokens)]
    with torch_threads(1):
        loaded = executor_loader.load_executor(load(ExecutorSettings, "inflight executor", flags))

    shape = read_model_shape(model)
    assert (shape.num_window_layers, shape.sliding_window) == (6, 32)
    weight_bytes = pool_of(shape, Machine(GIBIBYTE, False, 0.2, 0), "float32", 16).weight_bytes
    machine = Machine(500_000_000 + weight_bytes, False, 0.2, 0)
    pool = pool_of(shape, machine, "float32", 16, max_tokens, steps=Steps(12, 256))
    window = loaded.limits.kv_window
    assert window is not None
    assert (pool.num_blocks, pool.num_window_blocks) == (loaded.num_blocks, window.num_blocks)
    if not max_tokens:
        assert pool.num_blocks > 5 * pool_of(shape, machine, "float32", 16).num_blocks


@pytest.mark.parametrize(
    ("changes", "num_layers"),
    [
        ({"model_type": "gemma3_text"}, 5),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 3}, 4),
        ({"model_type": "gemma2"}, 3),
        ({"model_type": "phi3"}, 6),
        ({"model_type": "llama"}, 0),
        ({"model_type": "gemma2", "sliding_window": None}, 0),
        ({"layer_types": ["sliding_attention", "full_attention"] * 3}, 3),
    ],
)
def test_layers_with_windows_are_read_from_old_configurations(
    changes: dict[str, object], num_layers: int, config_file: Path
) -> None:
    config = json.loads(config_file.read_text()) | {"num_hidden_layers": 6, "sliding_window": 64} | changes
    config_file.write_text(json.dumps(config))
    assert read_model_shape(str(config_file)).num_window_layers == num_layers


# --- the command


def test_size_says_figures_and_flags(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--gpu", "h100-80gb", "--requests-per-s", "10", "--step-ms", "20", "--itl-ms", "15", "--max-tokens", "600"]
    assert main(["size", "--model", str(config_file), *flags]) == 0
    shown = capsys.readouterr().out
    rows = {line[:22].strip(): line[22:].split() for line in shown.splitlines()}
    assert rows["KV of a token"][:3] == ["131,072", "bytes", "exact"]
    assert rows["seats needed"][:2] == ["51", "estimated"]
    assert rows["executors"][0] == "1"
    assert rows["routers"][0] == "2"
    assert "--max-num-sequences 51 --max-num-tokens 8192" in shown
    assert "a step takes longer than the 15 ms between tokens" in shown


def test_size_adds_routers_for_the_tokens_that_one_core_does_not_carry(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Given 1,000 requests of 200 tokens each second, five times what a router is to carry
    flags = ["--gpu", "h100-80gb", "--requests-per-s", "1000", "--output-tokens", "200", "--step-ms", "20"]
    assert main(["size", "--model", str(config_file), *flags]) == 0
    rows = {line[:22].strip(): line[22:].split() for line in capsys.readouterr().out.splitlines()}
    assert rows["routers"][:2] == ["6", "estimated"]


def test_size_counts_windows_of_as_many_seats_as_fit(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads(config_file.read_text())
    sizings = []
    for changes in ({}, {"model_type": "gemma3_text", "sliding_window": 512}):
        config_file.write_text(json.dumps(config | changes))
        flags = ["--model", str(config_file), "--memory-gib", "64", "--prompt-tokens", "6000"]
        assert main(["size", "--json", *flags]) == 0
        sizings.append(json.loads(capsys.readouterr().out))
    one, two = sizings
    assert one["pool"]["num_window_blocks"] == 0
    assert two["pool"]["num_blocks"] > 2 * one["pool"]["num_blocks"]
    assert two["seats_per_replica"] > 2 * one["seats_per_replica"]
    assert two["seats_per_replica"] <= two["pool"]["num_window_seats"]


def test_size_as_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--memory-gib", "8", "--max-tokens-in-paged-kv-cache", "640", "--prompt-tokens", "100"]
    assert main(["size", "--json", *flags]) == 0
    sizing = json.loads(capsys.readouterr().out)
    assert sizing["pool"]["num_blocks"] == 40
    assert sizing["without_eviction"]["seats_mean"] == 2
    assert sizing["demand"] is None
    assert sizing["executor_flags"][:2] == ["--dtype", "bfloat16"]


@pytest.mark.parametrize(
    ("flags", "seats"), [(["--gpu", "h100-80gb"], 1024), (["--gpu", "l4-24gb"], 256), (["--memory-gib", "64"], 64)]
)
def test_size_assumes_the_seats_that_an_executor_has_by_itself(
    flags: list[str], seats: int, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = json.loads(config_file.read_text()) | {"num_hidden_layers": 1}
    config_file.write_text(json.dumps(tiny))
    assert main(["size", "--json", "--model", str(config_file), *flags]) == 0
    assert json.loads(capsys.readouterr().out)["seats_per_replica"] == seats


def test_size_takes_figures_of_a_running_system(capsys: pytest.CaptureFixture[str]) -> None:
    router = ScriptedRouter()
    router.capacity = inference_pb2.GetCapacityResponse(
        executors=[
            inference_pb2.ExecutorCapacity(
                executor_id="e0", blocks_total=4000, block_size=32, step_ms=12.5, seats_total=24
            ),
            inference_pb2.ExecutorCapacity(
                executor_id="e1", blocks_total=3000, block_size=32, step_ms=10.0, seats_total=32
            ),
        ]
    )
    with serving(router) as address:
        flags = ["size", "--json", "--from-running", "--address", address, "--requests-per-s", "4"]
        assert main(flags) == 0
        sizing = json.loads(capsys.readouterr().out)
        assert (sizing["pool"]["num_blocks"], sizing["pool"]["tokens_per_block"]) == (3000, 32)
        assert sizing["speed"]["step_ms"] == 12.5
        assert sizing["seats_per_replica"] == 24
        assert sizing["demand"]["seats_busy"] == pytest.approx(4 * 200 * 0.0125)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "/nowhere/at/all"], "no such folder"),
        (["--memory-gib", "0.1"], "no block"),
        (["--shared-prompt-tokens", "501"], "the 501 shared tokens are more than the 500 of a prompt"),
        (["--max-tokens-in-paged-kv-cache", "64"], "a request of 500 + 200 tokens does not fit"),
    ],
)
def test_what_cannot_be_is_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", *flags]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_size_needs_no_torch() -> None:
    from tests.contract.test_imports import imports_of, package_of, path_of, sources

    for path in (*sources("inflight/tools/sizing"), path_of("inflight.cli.size"), path_of("inflight.common.kv_size")):
        assert not {name for name in imports_of(path) if package_of(name) in ("torch", "transformers", "executor")}


LFM2 = {
    "model_type": "lfm2",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "block_ff_dim": 12288,
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "max_position_embeddings": 128_000,
    "vocab_size": 65536,
    "tie_word_embeddings": True,
}


def test_the_shape_of_recurrent_layers_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LFM2))
    shape = read_model_shape(str(tmp_path))
    assert shape.recurrent is not None
    assert (shape.recurrent.num_layers, shape.num_kv_layers) == (10, 6)
    # LFM2-1.2B.
    assert shape.num_parameters == pytest.approx(1.17e9, rel=0.01)
    # The last two inputs of 10 convolutions of 2048 channels.
    assert shape.recurrent.input_numbers == 10 * 2 * 2048


@pytest.mark.parametrize(
    ("config", "num_layers", "num_parameters"),
    [
        # Granite 4.0 H Tiny and Nemotron 3 Nano, with the names that their files have.
        (
            {
                "model_type": "granitemoehybrid",
                "hidden_size": 1536,
                "intermediate_size": 512,
                "shared_intermediate_size": 1024,
                "num_local_experts": 64,
                "num_hidden_layers": 40,
                "num_attention_heads": 12,
                "num_key_value_heads": 4,
                "layer_types": (["mamba"] * 9 + ["attention"]) * 4,
                "mamba_n_heads": 48,
                "mamba_d_state": 128,
                "mamba_d_head": 64,
                "vocab_size": 100_352,
                "tie_word_embeddings": True,
            },
            (36, 4),
            6.94e9,
        ),
        (
            {
                "model_type": "nemotron_h",
                "hidden_size": 2688,
                "intermediate_size": 1856,
                "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
                "num_hidden_layers": 52,
                "num_attention_heads": 32,
                "num_key_value_heads": 2,
                "head_dim": 128,
                "mamba_num_heads": 64,
                "mamba_head_dim": 64,
                "n_groups": 8,
                "ssm_state_size": 128,
                "n_routed_experts": 128,
                "moe_intermediate_size": 1856,
                "moe_shared_expert_intermediate_size": 3712,
                "vocab_size": 131_072,
            },
            (23, 6),
            31.6e9,
        ),
    ],
    ids=("granite", "nemotron"),
)
def test_the_shape_of_mamba_2_is_read(
    config: dict[str, Any], num_layers: tuple[int, int], num_parameters: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_model_shape(str(tmp_path))
    assert shape.recurrent is not None
    assert (shape.recurrent.num_layers, shape.num_kv_layers) == num_layers
    assert shape.num_parameters == pytest.approx(num_parameters, rel=0.02)


@pytest.mark.parametrize(
    ("name", "max_tokens", "num_seats", "num_adapters", "host_bytes"),
    [
        ("lfm2", 0, 0, 0, 0),
        ("lfm2", 20_000, 12, 0, 3_000_000),
        ("qwen3_5", 0, 4, 0, 0),
        ("qwen3_5", 5_000, 0, 0, 0),
        ("lfm2-native", 0, 0, 3, 0),
        ("qwen3_5-native", 0, 0, 3, 4_000_000),
        ("granite_hybrid-native", 0, 4, 0, 0),
        ("nemotron_h-native", 5_000, 0, 0, 0),
    ],
)
def test_its_recurrent_state_is_that_of_a_real_executor(
    name: str,
    max_tokens: int,
    num_seats: int,
    num_adapters: int,
    host_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = str(save_model(HYBRID_CONFIGS[name], tmp_path / name))
    monkeypatch.setattr(executor_loader, "num_available_memory_bytes", lambda: 500_000_000)
    flags = ["--model", model, "--dtype", "float32", "--device", "cpu", "--num-threads", "1"]
    flags += ["--max-num-sequences", str(num_seats), "--max-tokens-in-paged-kv-cache", str(max_tokens)]
    if host_bytes:
        flags += ["--kv-cache-host-memory-bytes", str(host_bytes), "--batch-scheduler-policy", "max_utilization"]
    if num_adapters:
        flags += ["--adapter-folder", str(tmp_path), "--max-adapters", str(num_adapters), "--max-adapter-rank", "20"]
    with torch_threads(1):
        loaded = executor_loader.load_executor(load(ExecutorSettings, "inflight executor", flags))

    shape = read_model_shape(model)
    options = MemoryOptions(max_adapters=num_adapters, max_adapter_rank=20, kv_cache_host_memory_bytes=host_bytes)
    beside = pool_of(shape, Machine(GIBIBYTE, False, 0.2, 0, options), "float32", 16)
    # The executor's free memory is what it finds after it has loaded weights and adapters.
    machine = Machine(500_000_000 + beside.weight_bytes + beside.adapter_bytes, False, 0.2, 0, options)
    pool = pool_of(shape, machine, "float32", 16, max_tokens, steps=Steps(num_seats, 256) if num_seats else None)
    states, kept = loaded.limits.states, loaded.model.forward.states
    assert states is not None
    assert kept is not None
    assert (pool.num_state_slots, pool.num_checkpoints) == (states.num_slots, states.num_checkpoints)
    assert (pool.num_blocks, pool.checkpoint_bytes) == (loaded.num_blocks, kept.checkpoint_bytes)
    assert pool.slot_bytes == kept.slot_bytes(0)
    assert (pool.num_host_blocks, pool.num_host_slots) == (loaded.limits.num_host_blocks, states.num_host_slots)
    assert bool(host_bytes) == bool(pool.num_host_slots)
    if num_adapters:
        assert loaded.model.forward.adapters is not None
        assert pool.adapter_bytes == num_adapters * loaded.model.forward.adapters.slot_bytes(20)


def test_size_counts_the_recurrent_state_of_as_many_seats_as_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LFM2))
    assert main(["size", "--model", str(tmp_path), "--memory-gib", "16", "--prompt-tokens", "6000"]) == 0
    rows = {line[:22].strip(): line[22:] for line in capsys.readouterr().out.splitlines()}
    assert "slots and" in rows["recurrent state"]
    assert "81,920" in rows["recurrent state"]
    assert main(["size", "--model", str(tmp_path), "--gpu", "h100-80gb"]) == 0
    assert "1152 slots and" in capsys.readouterr().out
