"""Layers of experts on a GPU, against torch on the same device, and gpt-oss against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inflight.common.model_source import resolve_model
from inflight.executor.checkpoint.decoder_weights import SQUARED_RELU
from inflight.executor.experts.products import Activation
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.model.loader import load_model
from tests.kernels.test_coded_experts import FORMATS, assert_products_are_those_of_the_dense_matrices
from tests.kernels.test_gpu_experts import assert_is_that_of_torch, assert_same_bits
from tests.support.checkpoints.gpt_oss import save_mxfp4

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_experts", "num_rows"), [(24, 3), (6, 9), (3, 25), (2, 300)])
def test_layer_is_that_of_torch(num_experts: int, num_rows: int, dtype: torch.dtype, gpu: torch.device) -> None:
    assert_is_that_of_torch(num_experts, num_rows, dtype, gpu)


@pytest.mark.parametrize("num_rows", [3, 300])
def test_layer_without_gates_is_that_of_torch(num_rows: int, gpu: torch.device) -> None:
    assert_is_that_of_torch(6, num_rows, torch.bfloat16, gpu, SQUARED_RELU)


@pytest.mark.parametrize("num_together", [4, 60])
def test_row_has_the_same_bits_alone_and_in_company(num_together: int, gpu: torch.device) -> None:
    assert_same_bits(num_together, torch.bfloat16, gpu)


@pytest.mark.parametrize("activation", [None, Activation()], ids=["down", "gates"])
@pytest.mark.parametrize("name", FORMATS)
def test_products_of_codes_are_those_of_the_dense_matrices(
    name: str, activation: Activation | None, gpu: torch.device
) -> None:
    assert_products_are_those_of_the_dense_matrices(name, activation, gpu)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpt_oss_is_that_of_transformers(dtype: str, tmp_path: Path) -> None:
    # Loading compares each layer, and the logits.
    source = resolve_model(str(save_mxfp4(tmp_path / "gpt-oss")))
    model = load_model(source, dtype_name=dtype, device_name="cuda")
    assert isinstance(model.forward, GpuForward)
    assert model.description.weight_dtype == "quantized"
