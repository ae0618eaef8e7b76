"""Products with quantized weights on a GPU, of the sizes of Llama-3-8B, have the numbers of the dense matrices, also
captured in a graph, and a model with them has the tokens of the dense one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inflight.common.model_source import resolve_model
from inflight.executor.checkpoint.quantized_weight import Coded, FloatWeight, dense_matrix
from inflight.executor.checkpoint.rounding import round_to
from inflight.executor.model.loader import load_model
from inflight.executor.products.coded import CodedWeight, coded_weight
from tests.kernels.test_gpu_quantized import CASES, PROMPTS
from tests.support.checkpoints.quantized_checkpoints import save_quantized
from tests.support.device.greedy import generate_together

pytestmark = pytest.mark.gpu

NUM_ROWS, NUM_COLUMNS = 4096, 14336


def fp8(rows: int, columns: int) -> FloatWeight:
    codes = torch.randint(0, 127, (NUM_ROWS, NUM_COLUMNS), dtype=torch.uint8)
    return FloatWeight(codes, torch.rand(-(-NUM_ROWS // rows), -(-NUM_COLUMNS // columns)) * 1e-4, 8, columns, rows)


def fp4(scale: Tensor, group_size: int) -> FloatWeight:
    return FloatWeight(torch.randint(0, 256, (NUM_ROWS, NUM_COLUMNS // 2), dtype=torch.uint8), scale, 4, group_size)


def mxfp4() -> FloatWeight:
    exponents = torch.randint(112, 120, (NUM_ROWS, NUM_COLUMNS // 32), dtype=torch.uint8)
    return fp4(exponents.view(torch.float8_e8m0fnu), 32)


FORMATS: dict[str, Callable[[], Coded]] = {
    "int4": lambda: round_to(torch.randn(NUM_ROWS, NUM_COLUMNS), 4, 128),
    "int8": lambda: round_to(torch.randn(NUM_ROWS, NUM_COLUMNS), 8, 32),
    "fp8 of rows": lambda: fp8(1, NUM_COLUMNS),
    "fp8 in blocks": lambda: fp8(128, 128),
    "mxfp4": mxfp4,
    "nvfp4": lambda: fp4((torch.rand(NUM_ROWS, NUM_COLUMNS // 16) * 9).to(torch.float8_e4m3fn), 16),
}


def made(name: str, gpu: torch.device) -> tuple[CodedWeight, Tensor]:
    """Returns a matrix of codes, and the same matrix in bfloat16."""
    weight = FORMATS[name]().to(gpu)
    dense = dense_matrix(weight, torch.bfloat16)
    return coded_weight([weight]), dense


@pytest.mark.parametrize("num_tokens", [1, 16, 40, 256, 300])
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_dense_matrix(gpu: torch.device, name: str, num_tokens: int) -> None:
    weight, dense = made(name, gpu)
    inputs = torch.randn(num_tokens, NUM_COLUMNS, device=gpu, dtype=torch.bfloat16)
    expected = inputs.double() @ dense.double().t()
    distance = (weight.product(inputs).double() - expected).norm() / expected.norm()
    assert float(distance) < 4e-3  # the outputs are rounded


@pytest.mark.parametrize("name", FORMATS)
def test_replayed_products_are_those_of_new_inputs(gpu: torch.device, name: str) -> None:
    weight, _ = made(name, gpu)
    inputs = torch.randn(8, NUM_COLUMNS, device=gpu, dtype=torch.bfloat16)
    weight.product(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = weight.product(inputs)
    inputs.normal_()
    graph.replay()
    assert torch.equal(outputs, weight.product(inputs))


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_the_expanded_model(name: str, tmp_path: Path) -> None:
    encode, config = CASES[name]
    source = resolve_model(str(save_quantized(tmp_path / "model", "llama", config, encode)))
    quantized, dense = (
        load_model(source, dtype_name="float32", device_name="cuda", weight_dtype=weight_dtype)
        for weight_dtype in ("auto", "dense")
    )
    assert quantized.description.weight_dtype == "quantized"
    assert generate_together(quantized, PROMPTS, 8, 4) == generate_together(dense, PROMPTS, 8, 4)
