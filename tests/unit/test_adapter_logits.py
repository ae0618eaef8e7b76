"""Logits with an adapter are those of PEFT's merged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from inflight.common.model_source import resolve_model
from inflight.executor.adapters.peft_files import parse, read_files
from inflight.executor.adapters.weights import AdapterLimits
from inflight.executor.forward.native import NativeForward
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.recurrent.mixer import StateSizes
from inflight.executor.scheduler.sequence import PlanRow, StepPlan
from inflight.executor.step.batch import pack
from tests.property.test_hybrid_models import CONFIGS as HYBRIDS
from tests.property.test_hybrid_models import NATIVE
from tests.property.test_native_hybrid import WITH_EXPERTS
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE, save_model, sizes
from tests.support.scheduler.scheduling import make_sequence

BLOCK_SIZE = 16
PROMPT = [3, 7, 1, 20, 55, 90, 13, 4, 4, 61, 17, 33, 8, 70, 29, 41, 2, 5]
NUM_OUTPUT_TOKENS = 12
# The LoRA part is rounded to the type of the activations. Measured: 0.05 and 0.12.
FORMS: dict[str, tuple[dict[str, Any], float]] = {
    "float32": ({"dtype_name": "float32"}, 1e-4),
    "bfloat16": ({"dtype_name": "bfloat16"}, 0.25),
    "int8": ({"dtype_name": "float32", "weight_dtype": "int8"}, 0.5),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "patterns": {
        "r": 4,
        "lora_alpha": 4,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"],
        "rank_pattern": {"q_proj": 16, r"layers\.1\.self_attn\.v_proj": 3},
        "alpha_pattern": {"mlp.up_proj": 9},
        "fan_in_fan_out": True,
    },
    "hybrid": {"r": 6, "target_modules": r".*\.(self_attn\.\w+_proj|mlp\.\w+_proj|feed_forward\.w\d)"},
    "attention": {"r": 3, "target_modules": ["q_proj", "v_proj", "o_proj"]},
    "outputs": {"r": 3, "target_modules": ["q_proj", "v_proj", "out_proj"]},
    "regex": {"r": 5, "target_modules": r".*\.(k_proj|o_proj|gate_proj)", "layers_to_transform": None},
}
MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**sizes()),
    "qwen3": Qwen3Config(**sizes(hidden_size=80, intermediate_size=100, head_dim=32)),
    **{name: HYBRIDS[name] for name in NATIVE},
    **WITH_EXPERTS,
}


# The gates of Granite 4 are one matrix in its files, and Nemotron-H names its layers otherwise.
MAMBA2 = ("granite_hybrid-native", "nemotron_h-native")
# Model, adapter and the forms of the weights.
CASES = (
    ("llama", "all", ["float32"]),
    ("llama", "regex", ["float32"]),
    ("qwen3", "patterns", sorted(FORMS)),
    *((name, "hybrid", ["float32", "int8"]) for name in NATIVE if name not in MAMBA2),
    ("granite_hybrid-native", "attention", ["float32"]),
    ("qwen3_5_moe", "attention", ["float32"]),
    # Layers without experts among those with some.
    ("qwen3_next", "attention", ["float32", "int8"]),
    ("lfm2_moe", "outputs", ["float32", "int8"]),
    *((name, "outputs", ["float32"]) for name in ("lfm2-native", "qwen3_5-native", "granite_hybrid-native")),
)


def peft_adapter(base: Path, folder: Path, fields: dict[str, Any]) -> Any:
    """Makes a random adapter with PEFT and returns the merged model."""
    from peft import LoraConfig, get_peft_model

    network: Any = AutoModelForCausalLM.from_pretrained(str(base))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        adapted = get_peft_model(network, LoraConfig(init_lora_weights=False, **fields))
    adapted.save_pretrained(str(folder))
    merged: Any = adapted.merge_and_unload()
    return merged.eval()


def logits_of(model: PagedModel, ids: list[int]) -> Tensor:
    """Logits of the last token, with the adapter in slot 1."""
    sequence = make_sequence("a", ids)
    sequence.adapter_slot, sequence.block_table, sequence.state_slot = 1, [1, 2], 0
    return model.logits(pack(StepPlan.of([PlanRow(sequence, 0, len(ids), True)]), BLOCK_SIZE))[0]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("family", "name", "forms"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_logits_are_those_of_the_merged_model(family: str, name: str, forms: list[str], tmp_path: Path) -> None:
    base, folder = save_model(MODELS[family], tmp_path / "base"), tmp_path / "adapter"
    merged = peft_adapter(base, folder, CONFIGS[name])
    ids = list(PROMPT)
    expected = []
    with torch.inference_mode():
        for _ in range(NUM_OUTPUT_TOKENS):
            expected.append(merged(torch.tensor([ids])).logits[0, -1])
            ids.append(int(expected[-1].argmax()))

    for form, tolerance in (FORMS[form] for form in forms):
        model = load_model(resolve_model(str(base)), device_name="cpu", **form)
        assert isinstance(model.forward, NativeForward)
        model.allocate_kv(4, BLOCK_SIZE)
        if model.forward.states is not None:
            model.forward.states.reserve(StateSizes(1, 0, 0))
        model.forward.decoder.reserve_adapters(2, 16)
        model.forward.decoder.load_adapter(
            1, parse(read_files(folder), AdapterLimits(model.forward.decoder.form.shape, 16))
        )
        for number, wanted in enumerate(expected):
            known = ids[: len(PROMPT) + number]
            logits = logits_of(model, known)
            assert logits.shape == (VOCABULARY_SIZE,)
            distance = float((logits - wanted).norm() / wanted.norm())
            assert distance <= tolerance, form
            if tolerance < 1e-3:
                assert int(logits.argmax()) == ids[len(known)]
                assert float((logits - wanted).abs().max()) <= tolerance
