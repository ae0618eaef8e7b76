"""The GPU decoder with quantized checkpoints as they are in the file, under Triton's interpreter, has the greedy tokens
of transformers with the dequantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from inflight.common.model_source import ModelError, resolve_model
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.gpu.layers import Weight
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.products.coded import CodedLinear, CodedMatrix, CodedWeight
from inflight.tools.sizing.arithmetic import Machine, pool_of
from inflight.tools.sizing.model_shape import read_model_shape
from inflight.tools.sizing.weights import Role
from tests.support.checkpoints.float_checkpoints import compressed_fp4, fp4_of_compressed_tensors, fp8_in_blocks
from tests.support.checkpoints.quantized_checkpoints import (
    Encoder,
    awq,
    awq_config,
    compressed_config,
    gptq,
    gptq_config,
    save_gguf,
    save_quantized,
)
from tests.support.device.greedy import assert_same, generate_alone, generate_together

PROMPTS = [[5, 9, 33, 7, 8], [40, 3]]
MXFP4 = "mxfp4-pack-quantized"
CASES: dict[str, tuple[Encoder, dict[str, Any]]] = {
    "gptq": (gptq(4, 64, has_act_order=True), gptq_config(4, 64, desc_act=True)),
    "fp8": (fp8_in_blocks(96, 64), {"quant_method": "fp8", "weight_block_size": [96, 64]}),
    "mxfp4": (fp4_of_compressed_tensors(MXFP4), compressed_config(MXFP4, **compressed_fp4(MXFP4))),
}


def load(folder: Path, **options: Any) -> PagedModel:
    source = resolve_model(str(folder))
    return load_model(source, **{"dtype_name": "float32", "backend_name": "triton", "device_name": "cpu"} | options)


def weights_of(model: PagedModel) -> list[Weight]:
    assert isinstance(model.forward, GpuForward)
    return [
        matrix
        for layer in model.forward.decoder._layers
        for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)
        if matrix is not None
    ]


AWQ = awq(64), awq_config(64)


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers_with_dense_weights(name: str, tmp_path: Path) -> None:
    encode, config = CASES[name]
    folder = save_quantized(tmp_path / "model", "llama", config, encode)
    model = load(folder)
    shape = read_model_shape(str(folder))
    predicted = pool_of(shape, Machine(1 << 40, True, 0.9, 0), "float32", 16).weight_bytes
    beside = 4 * sum(weight.number for weight in shape.weights if weight.role is not Role.MATRIX)
    network: Any = AutoModelForCausalLM.from_pretrained(str(tmp_path / "model-dense"), dtype=torch.float32)
    assert model.description.weight_dtype == "quantized"
    coded = [weight for weight in weights_of(model) if isinstance(weight, CodedWeight)]
    assert len(coded) == 8
    for weight in coded:
        assert all(isinstance(part, CodedMatrix) for part in weight.parts), "nothing is expanded"
    # The order of columns is not predicted. Of a large model it is a thousandth.
    assert sum(weight.num_bytes for weight in coded) + beside == pytest.approx(predicted, rel=0.015)
    for prompt, output in zip(PROMPTS, generate_together(model, PROMPTS, 2, 4), strict=True):
        assert_same(output, generate_alone(network, prompt, 2))


def test_gguf_of_several_types_stays_as_it_is(tmp_path: Path) -> None:
    # Given queries and values of other types than keys, and an output layer that is the embedding's
    kinds = [gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q8_0]
    path = save_gguf(tmp_path / "tiny.gguf", "qwen2", kinds)
    # When it is loaded, which compares its layers and logits with those of transformers
    model = load(path)
    # Then its products are of one type each, and so is the output layer
    assert model.description.weight_dtype == "quantized"
    qkv = weights_of(model)[0]
    assert isinstance(qkv, CodedWeight)
    assert len(qkv.parts) == 3
    assert isinstance(model.forward, GpuForward)
    head = model.forward.decoder.head
    assert isinstance(head, CodedWeight)
    assert all(isinstance(part, CodedMatrix) for part in head.parts)


def test_modules_of_transformers_multiply_codes(tmp_path: Path) -> None:
    encode, config = AWQ
    model = load(save_quantized(tmp_path / "model", "qwen2", config, encode), forward_name="transformers")
    forward: Any = model.forward
    assert sum(isinstance(module, CodedLinear) for module in forward.network.modules()) == 14


def test_weights_are_expanded_where_that_is_asked_for(tmp_path: Path) -> None:
    encode, config = CASES["fp8"]
    model = load(save_quantized(tmp_path / "model", "llama", config, encode), weight_dtype="dense")
    assert all(isinstance(weight, torch.Tensor) for weight in weights_of(model))


def test_self_check_sees_a_wrong_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, config = CASES["gptq"]
    multiply = CodedMatrix.multiply

    def wrong(self: CodedMatrix, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        multiply(self, inputs, outputs)
        outputs.mul_(1.3)

    monkeypatch.setattr(CodedMatrix, "multiply", wrong)
    with pytest.raises(ModelError, match="self-check failed: layer 0 does not yield"):
        load(save_quantized(tmp_path / "model", "llama", config, encode))
