"""Decoders of transformers through paged attention: they give transformers' own tokens or are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from inflight.common.model_source import ModelError, resolve_model
from inflight.executor.attention.backend import KvShape
from inflight.executor.attention.choice import choose_backend
from inflight.executor.checkpoint.packed_linear import PackedLinear, pack_linears
from inflight.executor.device import choose_device
from inflight.executor.forward.native import NativeForward
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.self_check import TOLERANCE_OF_HALF, relative_distance
from inflight.executor.native.build import BuildFailure
from inflight.executor.scheduler.sequence import PlanRow, StepPlan
from inflight.executor.step.batch import pack
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE, save_model, sizes
from tests.support.device.greedy import assert_same, generate_alone, generate_together
from tests.support.device.paged_cases import make_sequence

CPU = torch.device("cpu")
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
SUPPORTED: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**sizes()),
    "llama-yarn-bias": LlamaConfig(**sizes(rope_parameters=YARN, attention_bias=True)),
    "qwen2": Qwen2Config(**sizes()),
    "qwen2-one-sliding-layer": Qwen2Config(**sizes(use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    "qwen3": Qwen3Config(**sizes()),
    "qwen3-experts": Qwen3MoeConfig(**sizes(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)),
    "mistral-window": MistralConfig(**sizes(sliding_window=8)),
    "gemma2-window-softcap": Gemma2Config(**sizes(sliding_window=8, attn_logit_softcapping=2.0)),
    "gpt2": GPT2Config(vocab_size=VOCABULARY_SIZE, n_embd=64, n_layer=2, n_head=4, n_positions=256, eos_token_id=2),
    # The text of a model for text and images, whose image tokens are ids of its vocabulary.
    "gemma3-vision": Gemma3Config(
        text_config=Gemma3TextConfig(**sizes(sliding_window=8)),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        boi_token_index=VOCABULARY_SIZE - 3,
        image_token_index=VOCABULARY_SIZE - 2,
        eoi_token_index=VOCABULARY_SIZE - 1,
    ),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def load(folder: Path, **options: Any) -> PagedModel:
    options = {"dtype_name": "float32", "backend_name": "reference", "device_name": "cpu"} | options
    return load_model(resolve_model(str(folder)), **options)


def random_prompts(*lengths: int) -> list[list[int]]:
    numbers = random.Random(0)
    return [[numbers.randrange(3, VOCABULARY_SIZE) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_tokens_are_those_of_transformers(tmp_path: Path, name: str, backend: str) -> None:
    folder = save_model(SUPPORTED[name], tmp_path / name)
    network: Any = AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager")
    prompts = random_prompts(3, 40, 17, 1)

    together = generate_together(load(folder, backend_name=backend), prompts, num_tokens=20, chunk_tokens=11)

    for output_ids, prompt in zip(together, prompts, strict=True):
        assert_same(output_ids, generate_alone(network, prompt, 20))


def test_model_for_images_says_that_it_serves_text_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(save_model(SUPPORTED["gemma3-vision"], tmp_path / "tiny"))
    assert "is served for text only; its weights for images or sound take memory and are not used" in caplog.text
    caplog.clear()
    load(save_model(SUPPORTED["llama"], tmp_path / "plain"))
    assert "text only" not in caplog.text


def test_logits_are_float32_and_only_of_the_rows_asked_for(tmp_path: Path) -> None:
    model = load(save_model(SUPPORTED["llama"], tmp_path / "tiny"), dtype_name="bfloat16", backend_name="cpu")
    together = generate_together(model, random_prompts(30), num_tokens=2, chunk_tokens=16)
    assert len(together[0]) == 2, "the first chunk asked for no logits at all"
    assert model.description.dtype == "bfloat16"


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    folder = save_model(SUPPORTED["llama"], tmp_path / "tiny")
    prompt = random_prompts(50)[0]
    logits = []
    for dtype_name in ("float32", "bfloat16"):
        model = load(folder, dtype_name=dtype_name, backend_name="cpu")
        model.allocate_kv(4, 16)
        row = PlanRow(make_sequence(prompt, [4, 2, 1, 3]), 0, 50, True)
        logits.append(model.logits(pack(StepPlan.of([row]), 16)))
    assert logits[0].dtype == logits[1].dtype == torch.float32
    assert logits[0].shape == (1, VOCABULARY_SIZE)
    assert 0 < relative_distance(logits[1], logits[0]) < 0.05


def test_description_says_what_the_model_is(tmp_path: Path) -> None:
    folder = save_model(SUPPORTED["llama"], tmp_path / "tiny")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5], "top_p": 0.9}))
    model = load(folder)
    description = model.description
    assert [layer.shape for layer in model.forward.layout.layers] == [KvShape(num_kv_heads=2, head_dim=16)] * 2
    assert (description.vocabulary_size, description.context_length) == (VOCABULARY_SIZE, 256)
    assert description.eos_token_ids == (2, 5)
    assert description.defaults.sampling == {"top_p": 0.9}
    # Keys and values of 2 layers, 2 heads of 16 numbers of 4 bytes, 16 tokens.
    assert model.forward.layout.bytes_per_block(16) == 2 * 2 * 2 * 16 * 4 * 16


@pytest.mark.parametrize(
    ("generation", "words"),
    [
        ({"temperature": -1}, r"generation_config.json: temperature is -1; must be a number of at least 0"),
        ({"bad_words_ids": [[VOCABULARY_SIZE]]}, r"generation_config.json: bad_words_ids has token id 96 of 96"),
    ],
)
def test_errors_of_other_files_do_not_blame_the_architecture(
    tmp_path: Path, generation: dict[str, Any], words: str
) -> None:
    folder = save_model(SUPPORTED["llama"], tmp_path / "tiny")
    (folder / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(ModelError, match=f"^{words}"):
        load(folder)


def test_errors_of_settings_do_not_blame_the_architecture(tmp_path: Path) -> None:
    folder = save_model(SUPPORTED["gpt2"], tmp_path / "tiny")
    with pytest.raises(ModelError, match=r"^int8 weights need the native forward pass on a CPU, and the attention"):
        load(folder, weight_dtype="int8")
    with pytest.raises(ModelError, match=r"^int8 weights need the native forward pass on a CPU, and "):
        load(folder, weight_dtype="int8", backend_name="cpu")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MambaConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2), "it has linear_attention layers"),
        (
            LlamaConfig(**sizes(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})),
            "its dynamic rotary embedding depends on the other sequences",
        ),
    ],
    ids=["mamba", "dynamic-rope"],
)
def test_architectures_that_cannot_run_are_refused(tmp_path: Path, config: PretrainedConfig, reason: str) -> None:
    folder = save_model(config, tmp_path / "odd")
    with pytest.raises(ModelError, match=f"model architecture '{config.model_type}' is not supported: {reason}"):
        load(folder)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "'t5' is not supported: it is an encoder-decoder"),
        ({"model_type": "deepseek_v3"}, "'deepseek_v3' is not supported: it uses multi-head latent attention"),
        ({"model_type": "falcon", "alibi": True}, "'falcon' is not supported: it adds ALiBi biases"),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 9},
            "'qwen3_moe' is not supported: num_experts_per_tok is 9 and num_(local_)?experts 4",
        ),
        ({"model_type": "nothing-known"}, "cannot be loaded: .*nothing-known"),
        ({"model_type": "llama"}, "has no weights"),
        ({}, "cannot be loaded"),
    ],
    ids=["encoder-decoder", "latent-attention", "alibi", "few-experts", "unknown", "no-weights", "empty-config"],
)
def test_folders_are_refused_before_weights_are_read(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=words):
        load(tmp_path)


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    folder = save_model(SUPPORTED["llama"], tmp_path / "tiny")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated"):
        load(folder)


def test_missing_weights_are_not_replaced_by_random_ones(tmp_path: Path) -> None:
    folder = save_model(SUPPORTED["llama"], tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"lacks \d+ weights, such as model.layers.2"):
        load(folder)


def test_model_whose_logits_differ_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given attention that forgets the last key
    backend = choose_backend("reference", CPU, torch.float32).backend
    attend = type(backend).attend

    def forgetful(self: Any, queries: Any, kv: Any, batch: Any, scoring: Any, sinks: Any) -> Any:
        kv.keys[batch.slot_mapping[-1]] = 0
        return attend(self, queries, kv, batch, scoring, sinks)

    monkeypatch.setattr(type(backend), "attend", forgetful)
    with pytest.raises(ModelError, match=r"^the self-check failed: logits through paged attention are not those of"):
        load(save_model(SUPPORTED["llama"], tmp_path / "tiny"))


def test_model_that_transformers_rounds_more_than_we_do_is_served_in_bfloat16(tmp_path: Path) -> None:
    # Given embeddings with a large part that all tokens share, and an output layer that does not see it: transformers
    # rounds the residual stream, so that the small part of each token is lost behind it
    config = Gemma3TextConfig(
        **sizes(num_hidden_layers=8, initializer_range=0.02, tie_word_embeddings=False),
        query_pre_attn_scalar=16,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network: Any = AutoModelForCausalLM.from_config(config)
        shared = torch.where(torch.rand(64) < 0.5, -1.0, 1.0)
        network.model.embed_tokens.weight.data.normal_().add_(32 * shared)
        head = torch.randn(network.lm_head.weight.shape)
        network.lm_head.weight.data.copy_(head - (head @ shared / 64)[:, None] * shared)
    network.to(torch.bfloat16).save_pretrained(str(tmp_path))
    network.eval()

    # When transformers computes a prompt in both types
    ids = torch.arange(3, 24)[None]
    with torch.inference_mode():
        rounded = network(input_ids=ids).logits[0].float()
        exact = network.float()(input_ids=ids).logits[0]

    # Then its bfloat16 is beyond the tolerance, and the model is served natively as well as by transformers
    assert relative_distance(rounded, exact) > TOLERANCE_OF_HALF
    for forward_name in ("auto", "transformers"):
        model = load(tmp_path, dtype_name="bfloat16", backend_name="auto", forward_name=forward_name)
        assert isinstance(model.forward, NativeForward) == (forward_name != "transformers")


def test_without_a_compiler_the_reference_runs_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "inflight.executor.attention.choice.load_native", lambda name: BuildFailure("there is no C++ compiler")
    )
    folder = save_model(SUPPORTED["llama"], tmp_path / "tiny")

    model = load(folder, backend_name="auto")

    assert model.forward.backend_name == "reference"
    assert "there is no C++ compiler" in model.description.backend_reason
    assert "there is no C++ compiler" in caplog.text
    with pytest.raises(ModelError, match="attention backend 'cpu' cannot run: there is no C"):
        load(folder, backend_name="cpu")


@pytest.mark.parametrize("padding", [VOCABULARY_SIZE, -1, 32000])
def test_padding_outside_the_vocabulary_is_ignored(tmp_path: Path, padding: int) -> None:
    folder = save_model(SUPPORTED["llama"], tmp_path / "tiny")
    fields = json.loads((folder / "config.json").read_text()) | {"pad_token_id": padding}
    (folder / "config.json").write_text(json.dumps(fields))
    assert load(folder).description.vocabulary_size == VOCABULARY_SIZE


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"backend_name": "flash"}, "'flash' is unknown; use one of auto, reference, cpu, triton"),
        ({"dtype_name": "int4"}, "dtype 'int4' is unknown; use auto, bfloat16 or float32"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, option: dict[str, str], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        load(save_model(SUPPORTED["llama"], tmp_path / "tiny"), **option)


def test_gpu_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    with pytest.raises(ModelError, match="torch finds no GPU"):
        choose_device("cuda")


def test_packed_linears_compute_the_same() -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN does not multiply bfloat16 on this processor")
    generator = torch.Generator().manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Linear(40, 7, bias=False)).to(torch.bfloat16)
    inputs = torch.randn(2, 5, 24, generator=generator).to(torch.bfloat16)
    with torch.inference_mode():
        expected = network(inputs)
        assert pack_linears(network) == 2
        assert all(isinstance(module, PackedLinear) for module in network)
        torch.testing.assert_close(network(inputs), expected)
        assert network(inputs[:, :0]).shape == (2, 0, 7)
