"""Decoder families with a C++ forward pass, as tiny random models: logits and greedy tokens of transformers, and the
same bits alone, in chunks and in a batch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Glm4Config,
    Glm4MoeConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    MiniMaxM2Config,
    Ministral3Config,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
)
from transformers import Gemma3TextConfig as Gemma3Config

import inflight.common.model_source as model_source
from inflight.common.model_source import ModelError, resolve_model
from inflight.executor.checkpoint.decoder_weights import FAMILIES
from inflight.executor.checkpoint.support import check_configuration
from inflight.executor.forward.native import NativeForward
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.self_check import relative_distance
from inflight.executor.scheduler.sequence import PlanRow, StepPlan
from inflight.executor.step.batch import pack
from tests.property.test_hybrid_models import CONFIGS as HYBRID_CONFIGS
from tests.property.test_native_hybrid import WITH_EXPERTS
from tests.property.test_row_invariance import BLOCK_SIZE, one_by_one, sequence_of
from tests.support.checkpoints.float_checkpoints import fp8_in_blocks
from tests.support.checkpoints.gguf_models import save_gguf_model
from tests.support.checkpoints.gpt_oss import gpt_oss_config, save_gpt_oss, save_mxfp4
from tests.support.checkpoints.quantized_checkpoints import CONFIGS as QUANTIZED_CONFIGS
from tests.support.checkpoints.quantized_checkpoints import save_quantized
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE, save_model, sizes
from tests.support.device.greedy import assert_same, generate_alone, generate_together
from tests.support.device.torch_threads import torch_threads

# The first test of a build may wait for the compiler.
pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]

GENERATOR = torch.Generator().manual_seed(0)
TEXTS = [torch.randint(3, VOCABULARY_SIZE, (n,), generator=GENERATOR).tolist() for n in (24, 3, 17)]
# Windows and caps that matter within the texts.
GEMMA = {"sliding_window": 8, "query_pre_attn_scalar": 24, "final_logit_softcapping": 3.0}
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }
}
# Queries are scaled from position 64 on.
MINISTRAL = {
    "rope_parameters": YARN["rope_parameters"] | {"original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.5}
}
CONFIGS: dict[str, PretrainedConfig] = {
    "phi3": Phi3Config(**sizes()),
    "phi3-partial-rotary-window": Phi3Config(**sizes(partial_rotary_factor=0.5, sliding_window=8)),
    "granite": GraniteConfig(
        **sizes(
            embedding_multiplier=3.0,
            residual_multiplier=0.5,
            attention_multiplier=0.1,
            logits_scaling=4.0,
            attention_bias=True,
        )
    ),
    "olmo2": Olmo2Config(**sizes()),
    "gemma2": Gemma2Config(**sizes(**GEMMA, attn_logit_softcapping=2.0)),
    "gemma3": Gemma3Config(
        **sizes(**GEMMA, num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    ),
    "olmo3": Olmo3Config(**sizes(sliding_window=8, layer_types=["sliding_attention", "full_attention"], **YARN)),
    "smollm3": SmolLM3Config(**sizes(num_hidden_layers=3, no_rope_layers=[1, 0, 1], attention_bias=True)),
    "exaone4": Exaone4Config(
        **sizes(sliding_window=8, layer_types=["sliding_attention", "full_attention"], sliding_window_pattern=2)
    ),
    "exaone4-without-windows": Exaone4Config(**sizes(sliding_window=None, layer_types=["full_attention"] * 2)),
    "seed-oss": SeedOssConfig(**sizes(attention_bias=True, attention_out_bias=True)),
    "ministral3": Ministral3Config(**sizes(**MINISTRAL)),
    "mixtral": MixtralConfig(**sizes(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3-moe": Qwen3MoeConfig(
        **sizes(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=False)
    ),
    "qwen3-moe-dense-layer": Qwen3MoeConfig(
        **sizes(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40, mlp_only_layers=[0])
    ),
    "qwen2-moe": Qwen2MoeConfig(
        **sizes(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40, shared_expert_intermediate_size=72)
    ),
    # The first layer is dense, and the shared expert has no gate.
    "glm4-moe": Glm4MoeConfig(
        **sizes(n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=40, first_k_dense_replace=1),
        routed_scaling_factor=1.5,
        use_qk_norm=True,
    ),
    "minimax-m2": MiniMaxM2Config(**sizes(num_local_experts=6, num_experts_per_tok=2)),
    "olmoe": OlmoeConfig(**sizes(num_experts=6, num_experts_per_tok=3)),
    "granite-moe": GraniteMoeConfig(
        **sizes(num_local_experts=6, num_experts_per_tok=2, residual_multiplier=0.5, logits_scaling=4.0)
    ),
    # Without recurrent layers.
    "granite-4": GraniteMoeHybridConfig(
        **sizes(num_local_experts=0, shared_intermediate_size=72, residual_multiplier=0.5, logits_scaling=4.0),
        layer_types=["full_attention", "full_attention"],
        position_embedding_type="rope",
    ),
    "gpt-oss": gpt_oss_config(),
    "gpt-oss-mxfp4": gpt_oss_config(),
    # Experts in Q4_K and Q6_K, whose groups have shifts or none.
    "qwen3-moe-gguf": Qwen3MoeConfig(
        **sizes(num_experts=6, num_experts_per_tok=3, hidden_size=256, moe_intermediate_size=256), norm_topk_prob=True
    ),
    # In FP8 blocks.
    "qwen3-moe-fp8": QUANTIZED_CONFIGS["qwen3_moe"],
}
HYBRIDS = (*HYBRID_CONFIGS.values(), *WITH_EXPERTS.values())
FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype_name": "float32"},
    "bfloat16": {"dtype_name": "bfloat16"},
    "int8": {"dtype_name": "bfloat16", "weight_dtype": "int8", "kv_cache_dtype": "int8"},
}
# In the fast tier: fused parts, factors, norms, windows, layers without rotation, experts of each kind of routing.
QUICK = ("phi3-partial-rotary-window", "granite", "gemma3", "smollm3", "qwen2-moe", "glm4-moe", "gpt-oss-mxfp4")
IN_FLOAT32 = [pytest.param((name, "float32"), marks=() if name in QUICK else pytest.mark.slow) for name in CONFIGS]
CASES = [
    *IN_FLOAT32,
    *(("gemma3", "bfloat16"), ("qwen3-moe-fp8", "bfloat16"), ("qwen3-moe", "int8")),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (("gpt-oss-mxfp4", "bfloat16"), ("qwen3-moe-gguf", "bfloat16"), ("gpt-oss", "int8"))
    ),
]
# Relative distance of logits from those of transformers in float32: rounding of each form.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "int8": 0.4}
# Added where rounding may make a router choose another expert. These have 3 of 8 or 2 of 4, so that one matters.
OTHER_EXPERTS = 0.5


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Imports of GGUF files go to a folder of these tests."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_source, "cache_folder", lambda: folder)
        yield


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    name, form = request.param
    return name, form


@pytest.fixture(scope="module")
def folder(case: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, _ = case
    if name.startswith("gpt-oss"):
        save = save_mxfp4 if name == "gpt-oss-mxfp4" else save_gpt_oss
        return save(tmp_path_factory.mktemp("models") / name)
    if name == "qwen3-moe-gguf":
        path = tmp_path_factory.mktemp("models") / "tiny.gguf"
        kinds = gguf.GGMLQuantizationType
        save_gguf_model(path, "qwen3moe", CONFIGS[name], [kinds.Q4_K, kinds.Q6_K, kinds.Q4_K])
        return path
    if name == "qwen3-moe-fp8":
        quantization = {"quant_method": "fp8", "weight_block_size": [64, 64]}
        return save_quantized(
            tmp_path_factory.mktemp("models") / name, "qwen3_moe", quantization, fp8_in_blocks(64, 64)
        )
    return save_model(CONFIGS[name], tmp_path_factory.mktemp("models") / name, has_random_vectors=True)


@pytest.fixture(scope="module")
def network(folder: Path) -> Any:
    dense = folder.with_name(f"{folder.stem}-dense")
    folder = dense if dense.is_dir() else folder
    return AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager")


def load(folder: Path, form: str, **options: Any) -> PagedModel:
    options = {"backend_name": "cpu", "device_name": "cpu"} | FORMS[form] | options
    return load_model(resolve_model(str(folder)), **options)


@pytest.fixture(scope="module")
def model(case: tuple[str, str], folder: Path) -> PagedModel:
    _, form = case
    # Queries of Ministral 3 are not scaled up to this length.
    loaded = load(folder, form, max_sequence_length=64)
    assert isinstance(loaded.forward, NativeForward)
    return loaded


# Rounding changes tokens.
@pytest.mark.parametrize("case", IN_FLOAT32, ids="-".join, indirect=True)
def test_tokens_are_those_of_transformers(model: PagedModel, network: Any) -> None:
    together = generate_together(model, TEXTS, num_tokens=8, chunk_tokens=11)

    for output_ids, prompt in zip(together, TEXTS, strict=True):
        assert_same(output_ids, generate_alone(network, prompt, 8))


def test_logits_are_near_transformers_and_the_same_bits_alone_in_chunks_and_together(
    model: PagedModel, folder: Path, network: Any, case: tuple[str, str]
) -> None:
    """On two threads those together, and on one those alone."""
    _, form = case
    model.allocate_kv(16, BLOCK_SIZE)
    alone = [one_by_one(model, text, 1) for text in TEXTS]
    with torch.inference_mode():
        expected = [network(torch.tensor([text])).logits[0] for text in TEXTS]
    assert isinstance(model.forward, NativeForward)
    tolerance = TOLERANCE[form]
    if model.forward.decoder.form.shape.num_experts and form != "float32":
        tolerance += OTHER_EXPERTS
    for found, wanted in zip(alone, expected, strict=True):
        assert relative_distance(found, wanted) < tolerance

    # Each text's last token but one ends a chunk, beside the others' chunks and decodes.
    sequences = [sequence_of(i, text, 1 + 4 * i) for i, text in enumerate(TEXTS)]
    first, second, third = sequences
    steps = [
        [PlanRow(first, 0, 13, True)],
        [PlanRow(second, 0, 2, True), PlanRow(first, 13, 10, True)],
        [PlanRow(first, 23, 1, True), PlanRow(second, 2, 1, True), PlanRow(third, 0, 16, True)],
        [PlanRow(third, 16, 1, True)],
    ]
    with torch_threads(2):
        together = load(folder, form, max_sequence_length=64)
    together.allocate_kv(16, BLOCK_SIZE)
    for rows in steps:
        logits = together.logits(pack(StepPlan.of(rows), BLOCK_SIZE))
        for row, found in zip(rows, logits, strict=True):
            assert torch.equal(found, alone[sequences.index(row.sequence)][row.start + row.num_tokens - 1])


def test_greedy_ids_are_those_of_the_largest_logits(model: PagedModel) -> None:
    assert isinstance(model.forward, NativeForward)
    model.allocate_kv(16, BLOCK_SIZE)
    rows = [PlanRow(sequence_of(i, text, 1 + 4 * i), 0, len(text), True) for i, text in enumerate(TEXTS)]
    batch = pack(StepPlan.of(rows), BLOCK_SIZE)
    assert model.forward.decoder.greedy(batch, model.kv).tolist() == model.logits(batch).argmax(-1).tolist()


def test_every_family_is_tested() -> None:
    tested = {type(AutoModelForCausalLM.from_config(config)).__name__ for config in CONFIGS.values()}
    elsewhere = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
    hybrid = {type(AutoModelForCausalLM.from_config(config)).__name__ for config in HYBRIDS}
    assert tested | elsewhere | hybrid == FAMILIES.keys()


def longrope(**changes: Any) -> PretrainedConfig:
    """A model with half of each head rotated, and different factors up to 32 tokens and above."""
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.1, 1.2, 1.5],
        "long_factor": [1.0, 2.0, 4.0, 7.0],
    }
    config = Phi3Config(**sizes(rope_parameters=rope, original_max_position_embeddings=32))
    # Not through the constructor, which refuses some of them itself.
    parameters: Any = config.rope_parameters
    parameters.update(changes)
    return config


@pytest.mark.parametrize("forward", ["auto", "transformers"])
def test_longrope_uses_the_factors_of_the_longest_accepted_sequence(tmp_path: Path, forward: str) -> None:
    folder = save_model(longrope(), tmp_path / "long", has_random_vectors=True)
    network = AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager")
    text = (TEXTS[0] * 2)[:40]
    with torch.inference_mode():
        expected = {length: network(torch.tensor([text[:length]])).logits[0] for length in (24, 40)}

    short = load(folder, "float32", forward_name=forward, max_sequence_length=32)
    long = load(folder, "float32", forward_name=forward)
    for model in (short, long):
        assert isinstance(model.forward, NativeForward) == (forward != "transformers")
        model.allocate_kv(16, BLOCK_SIZE)

    # transformers takes the short factors for 24 tokens, and the long ones for 40 and all tokens before.
    assert relative_distance(one_by_one(short, text[:24], 1), expected[24]) < 1e-4
    long_logits = one_by_one(long, text, 1)
    assert relative_distance(long_logits, expected[40]) < 1e-4
    # A shorter sequence of the same model has the same bits.
    assert torch.equal(one_by_one(long, text[:24], 8), long_logits[:24])
    assert relative_distance(long_logits[:24], expected[24]) > 0.01


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"short_factor": [1.0] * 3}, "short_factor of its longrope parameters has 3 numbers, not 4"),
        ({"long_factor": [1.0, 1.0, 1.0, 0.0]}, "long_factor of its longrope parameters has a number that is not pos"),
        ({"long_factor": "long"}, "long_factor of its longrope parameters is not a list of numbers"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings of its longrope parameters is"),
    ],
)
def test_wrong_longrope_parameters_are_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=f"'phi3' is not supported: {reason}"):
        check_configuration(longrope(**changes))


def test_a_folder_with_wrong_longrope_factors_is_refused(tmp_path: Path) -> None:
    folder = save_model(longrope(), tmp_path / "wrong")
    path = folder / "config.json"
    path.write_text(path.read_text().replace("7.0", "7.0, 8.0"))
    with pytest.raises(ModelError, match=r"long_factor.*(length 4, got 5|has 5 numbers, not 4)"):
        load(folder, "float32")


def test_dynamic_rope_is_refused_by_name() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ModelError, match="its dynamic rotary embedding depends on the other sequences of a batch"):
        check_configuration(GraniteConfig(**sizes(rope_parameters=rope)))


def test_other_activations_are_named_and_left_to_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_model(Gemma2Config(**sizes(**GEMMA, hidden_activation="gelu")), tmp_path / "gelu")
    with caplog.at_level("INFO"):
        assert not isinstance(load(folder, "float32").forward, NativeForward)
    assert "using the forward pass of transformers, because its activation is gelu" in caplog.text


EXPERTS = {"num_hidden_layers": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            Glm4MoeConfig(**sizes(**EXPERTS, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=0)),
            "its router chooses among groups of experts",
        ),
        (
            OlmoeConfig(**sizes(**EXPERTS, num_experts=4, clip_qkv=8.0)),
            "its queries, keys and values are clipped",
        ),
    ],
    ids=["groups", "clipped"],
)
def test_other_layers_with_experts_are_left_to_transformers(
    config: PretrainedConfig, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert not isinstance(load(save_model(config, tmp_path / "other"), "float32").forward, NativeForward)
    assert f"because {reason}" in caplog.text


@pytest.mark.parametrize("length", [64, 65])
def test_queries_that_are_scaled_by_position_are_left_to_transformers(
    length: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_model(Ministral3Config(**sizes(**MINISTRAL)), tmp_path / "long")
    with caplog.at_level("INFO"):
        model = load(folder, "float32", max_sequence_length=length)
    assert isinstance(model.forward, NativeForward) == (length <= 64)
    assert ("because its queries are scaled by position beyond 64 tokens" in caplog.text) == (length > 64)


def test_positions_that_scale_queries_are_computed_by_transformers(tmp_path: Path) -> None:
    folder = save_model(Ministral3Config(**sizes(**MINISTRAL)), tmp_path / "long")
    network = AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager")
    text = (TEXTS[0] * 6)[:140]
    model = load(folder, "float32")
    model.allocate_kv(16, BLOCK_SIZE)
    with torch.inference_mode():
        expected = network(torch.tensor([text])).logits[0]
    assert relative_distance(one_by_one(model, text, 1), expected) < 1e-4


@pytest.mark.parametrize("rotated", [1.0, 0.5], ids=["Phi-3-mini-128k", "Phi-4-mini"])
@pytest.mark.parametrize("kind", ["su", "longrope"])
def test_longrope_is_read_as_the_files_on_the_hub_have_it(kind: str, rotated: float, tmp_path: Path) -> None:
    config = longrope(partial_rotary_factor=rotated)
    factors: Any = config.rope_parameters
    for name, numbers in (("short_factor", [1.0, 1.1, 1.2, 1.5]), ("long_factor", [1.0, 2.0, 4.0, 7.0])):
        factors[name] = numbers if rotated == 0.5 else numbers + [number + 0.5 for number in numbers]
    folder = save_model(config, tmp_path / "new", has_random_vectors=True)
    old = shutil.copytree(folder, tmp_path / "old")
    fields = json.loads((old / "config.json").read_text())
    rope = fields.pop("rope_parameters")
    fields["rope_scaling"] = {"type": kind, "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    fields |= {"rope_theta": rope["rope_theta"], "original_max_position_embeddings": 32, "head_dim": None}
    fields |= {} if rotated == 1.0 else {"partial_rotary_factor": rotated}
    (old / "config.json").write_text(json.dumps(fields))

    logits = []
    for model in (load(folder, "float32"), load(old, "float32")):
        model.allocate_kv(16, BLOCK_SIZE)
        logits.append(one_by_one(model, (TEXTS[0] * 2)[:40], 1))
    assert torch.equal(*logits)


# Families that differ in more than the data of `decoder_weights` describes.
OTHERS: dict[str, PretrainedConfig] = {
    "arcee": ArceeConfig(**sizes()),
    "cohere2": Cohere2Config(**sizes(sliding_window=8, layer_types=["sliding_attention", "full_attention"])),
    "glm4": Glm4Config(**sizes()),
    "ernie4.5": Ernie4_5Config(**sizes()),
    "hunyuan": HunYuanDenseV1Config(**sizes()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_run_through_transformers(name: str, tmp_path: Path) -> None:
    folder = save_model(OTHERS[name], tmp_path / name, has_random_vectors=True)
    network = AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager")
    model = load(folder, "float32")
    assert not isinstance(model.forward, NativeForward)
    model.allocate_kv(16, BLOCK_SIZE)
    with torch.inference_mode():
        expected = network(torch.tensor([TEXTS[0]])).logits[0]
    assert relative_distance(one_by_one(model, TEXTS[0], 1), expected) < 1e-4
