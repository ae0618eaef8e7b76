"""Adapters that cannot be served are refused by the field or tensor, and affect no other."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inflight.common.model_files.recurrent import MixerShape
from inflight.executor.adapters.errors import AdapterError
from inflight.executor.adapters.folder import AdapterFolder
from inflight.executor.adapters.peft_files import (
    CONFIG_FILE,
    PREFIX,
    WEIGHTS_FILE,
    AdapterFiles,
    parse,
    read_files,
)
from inflight.executor.adapters.weights import AdapterWeights
from inflight.executor.checkpoint.decoder_weights import PROJECTIONS
from tests.support.checkpoints.adapter_files import LIMITS, TARGETS, save_adapter, tensors

FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
LAST = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"


def read(folder: Path) -> AdapterWeights:
    return parse(read_files(folder), LIMITS)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora is set"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"lora_bias": True}, "lora_bias is set"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is set"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is set"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is set"),
        ({"target_parameters": ["x"]}, "target_parameters is set"),
        ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow is set"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"target_modules": [*TARGETS, "lm_head"]}, "target_modules names lm_head"),
        ({"target_modules": [*TARGETS, "embed_tokens"]}, "target_modules names model.embed_tokens"),
        ({"target_modules": [*TARGETS, "router"]}, "target_modules names 'router'"),
        ({"target_modules": None}, "target_modules is missing"),
        ({"target_modules": "("}, "target_modules is not a regular expression"),
        ({"target_modules": ["q_proj"]}, "which is not of a projection of attention or of"),
        ({"layers_to_transform": [0, 2]}, "layers_to_transform has layer 2"),
        ({"r": 0}, "r must be an integer of at least 1, not 0"),
        ({"r": True}, "r must be an integer"),
        ({"lora_alpha": "8"}, "lora_alpha must be a finite number"),
        ({"rank_pattern": {"q_proj": 17}}, "rank 17 of model.layers.0.self_attn.q_proj is above max_adapter_rank=16"),
        ({"rank_pattern": {"q_proj": 5}}, r"has shape \[4, 64\], and the model needs \[5, 64\]"),
        ({"alpha_pattern": {"(": 5}}, "alpha_pattern: .* is not a regular expression"),
    ],
)
def test_configuration_is_refused_by_its_field(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(AdapterError, match=text):
        read(save_adapter(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({FIRST: torch.zeros(4, 65)}, "lora_A.weight has shape .4, 65., and the model needs .4, 64."),
        ({LAST: torch.zeros(63, 4)}, "lora_B.weight has shape .63, 4., and the model needs .64, 4."),
        ({LAST: torch.zeros(64, 4, dtype=torch.int32)}, "has type torch.int32"),
        ({LAST: torch.full((64, 4), torch.nan)}, "has numbers that are not finite"),
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)}, "has base_model.model.lm_head.lora_A.weight"),
    ],
)
def test_weights_are_refused_by_their_tensor(tmp_path: Path, changes: dict[str, Tensor], text: str) -> None:
    with pytest.raises(AdapterError, match=text):
        read(save_adapter(tmp_path, weights=tensors(0) | changes))


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    weights = tensors(0)
    del weights[LAST]
    with pytest.raises(AdapterError, match=f"lacks {LAST}"):
        read(save_adapter(tmp_path, weights=weights))


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    files = read_files(save_adapter(tmp_path))
    for weights in (b"", files.weights[:7], files.weights[:100], files.weights[:-1]):
        with pytest.raises(AdapterError, match=f"{WEIGHTS_FILE} is not a whole safetensors file"):
            parse(AdapterFiles(files.config, weights), LIMITS)
    for config in (b"", files.config[:-1], b"[]", b"\xff"):
        with pytest.raises(AdapterError, match=f"{CONFIG_FILE} is not"):
            parse(AdapterFiles(config, files.weights), LIMITS)


def test_patterns_decide_the_targets_as_in_peft(tmp_path: Path) -> None:
    weights = {name: tensor for name, tensor in tensors(0, targets=("q_proj", "up_proj")).items() if ".1." in name}
    folder = save_adapter(
        tmp_path,
        weights=weights,
        target_modules=r"model\.layers\.\d+\..*(q|up|down)_proj",
        exclude_modules=["down_proj"],
        layers_to_transform=1,
        alpha_pattern={"self_attn.q_proj": 2},
        use_rslora=True,
    )
    first, second = read(folder).layers
    assert first == (None,) * len(PROJECTIONS)
    scales = {name: matrix.scale for name, matrix in zip(PROJECTIONS, second, strict=True) if matrix is not None}
    assert scales == {"self_attn.q_proj": 1.0, "mlp.up_proj": 4.0}


def test_folder_follows_its_files_and_leaves_out_what_is_broken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    save_adapter(tmp_path / "good", seed=1)
    save_adapter(tmp_path / "dora", use_dora=True)
    save_adapter(tmp_path / "bad name")
    (tmp_path / "empty").mkdir()
    os.unlink(save_adapter(tmp_path / "half") / WEIGHTS_FILE)
    folder = AdapterFolder(tmp_path, LIMITS)

    # Given two looks, each that is broken is logged once
    (good,) = folder.look()
    assert folder.look() == (good,)
    assert (good.name, good.rank, len(good.hash)) == ("good", 4, 64)
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [
        "bad name",
        "dora",
        "half",
    ]

    # When files come, change and go
    save_adapter(tmp_path / "half", seed=2)
    save_adapter(tmp_path / "good", seed=3)
    new_good, half = folder.look()
    assert (new_good.name, half.name) == ("good", "half")
    assert len({good.hash, new_good.hash, half.hash}) == 3
    assert folder.read(new_good).rank == 4
    with pytest.raises(AdapterError, match="its files have changed"):
        folder.read(good)
    os.unlink(tmp_path / "good" / CONFIG_FILE)
    assert folder.look() == (half,)

    # Then a folder that cannot be read for a time takes nothing away
    tmp_path.rename(tmp_path.with_name("moved"))
    assert folder.look() == (half,)
    tmp_path.with_name("moved").rename(tmp_path)
    assert folder.look() == (half,)


def test_model_with_experts_has_adapters_of_attention_only(tmp_path: Path) -> None:
    limits = replace(LIMITS, shape=replace(LIMITS.shape, num_experts=4))
    everywhere, attention = save_adapter(tmp_path / "all"), ["q_proj", "o_proj"]
    with pytest.raises(AdapterError, match="target_modules names 'gate_proj'"):
        parse(read_files(everywhere), limits)
    folder = save_adapter(tmp_path / "attention", weights=tensors(0, 4, tuple(attention)), target_modules=attention)
    for layer in parse(read_files(folder), limits).layers:
        changed = [name for name, matrix in zip(PROJECTIONS, layer, strict=True) if matrix is not None]
        assert changed == ["self_attn.q_proj", "self_attn.o_proj"]


def test_recurrent_layers_have_adapters_of_their_last_projection_and_feed_forward_layers(tmp_path: Path) -> None:
    """An LFM2, whose `out_proj` are of attention and of convolutions."""
    names = (*PROJECTIONS[:3], "self_attn.out_proj", *(f"feed_forward.{name}" for name in ("w1", "w3", "w2")))
    shape = replace(
        LIMITS.shape,
        recurrent_layers=(0,),
        mixer=MixerShape(conv_width=3, channels=LIMITS.shape.hidden_size),
        projections=names,
        mixer_output="conv.out_proj",
    )
    limits = replace(LIMITS, shape=shape)
    with pytest.raises(AdapterError, match="target_modules names 'in_proj', which is no projection of attention"):
        parse(read_files(save_adapter(tmp_path / "in", target_modules=["in_proj"])), limits)

    targets = ("out_proj", "w1")
    weights = tensors(0, 4, targets, limits)
    folder = save_adapter(tmp_path / "right", weights=weights, target_modules=list(targets))
    convolution, attention = parse(read_files(folder), limits).layers
    changed = [
        {name for name, matrix in zip(names, layer, strict=True) if matrix is not None}
        for layer in (convolution, attention)
    ]
    assert changed == [{"feed_forward.w1", "self_attn.out_proj"}] * 2
    assert {name for name in weights if "out_proj" in name} == {
        f"{PREFIX}model.layers.{layer}.out_proj.lora_{side}.weight"
        for layer in ("0.conv", "1.self_attn")
        for side in "AB"
    }

    of_convolution = {f"{PREFIX}model.layers.0.conv.in_proj.lora_{side}.weight": torch.zeros(4, 64) for side in "AB"}
    folder = save_adapter(tmp_path / "all", weights=weights | of_convolution, target_modules="all-linear")
    with pytest.raises(AdapterError, match=r"layers.0.conv.in_proj.lora_A.weight, which is not of a projection of"):
        parse(read_files(folder), limits)


def test_hash_depends_on_both_files(tmp_path: Path) -> None:
    hashes = {
        read_files(save_adapter(tmp_path / "a")).hash,
        read_files(save_adapter(tmp_path / "b", lora_alpha=9)).hash,
        read_files(save_adapter(tmp_path / "c", seed=1)).hash,
    }
    assert len(hashes) == 3
    assert read_files(save_adapter(tmp_path / "d")).hash in hashes
