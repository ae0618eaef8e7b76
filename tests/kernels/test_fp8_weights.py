"""FP8 weights and activations of the GPU decoder: rounding under Triton's interpreter, products by torch on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config

from inflight.common.model_source import ModelError, ModelSource, resolve_model
from inflight.executor.checkpoint.fp8_weight import Fp8Weight, round_rows, stacked
from inflight.executor.formats.loading import load_network
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.gpu.layers import linear, rounded_rows
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.self_check import relative_distance
from inflight.executor.step.batch import StepBatch
from inflight.tools.sizing.arithmetic import fp8_weight_bytes
from inflight.tools.sizing.model_shape import read_model_shape
from tests.kernels.fp8_kv import assert_fused_rounding_changes_nothing, assert_kernels_apply_scales, rounded
from tests.support.checkpoints.quantized_checkpoints import compressed, compressed_config, save_quantized
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE, save_model, sizes
from tests.support.device.paged_cases import Spec, make_case

pytestmark = pytest.mark.usefixtures("one_seed_and_thread")

FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}


def load(folder: Path, weight_dtype: str = "fp8", **changes: Any) -> PagedModel:
    options: dict[str, Any] = {"dtype_name": "float32", "backend_name": "triton", "device_name": "cpu"} | changes
    return load_model(resolve_model(str(folder)), weight_dtype=weight_dtype, **options)


def widened(weight: Fp8Weight) -> Tensor:
    """The matrix `[out, in]` in float64."""
    return weight.numbers.double() * weight.scales.double().t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    rows = (torch.randn(9, 80) * 2.0 ** torch.randint(-40, 20, (9, 1))).to(dtype)
    rows[0] *= 2.0 ** torch.randint(-25, 0, (80,))
    rows[1] = 0
    assert torch.equal(rounded_rows(rows).widened(), rounded(rows))


@pytest.mark.parametrize("size", [48, 80])
def test_norm_and_gate_round_in_the_same_kernel(size: int) -> None:
    assert_fused_rounding_changes_nothing(5, size)


def test_kernels_apply_the_scales_of_products() -> None:
    assert_kernels_apply_scales(5, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_product_is_that_of_the_rounded_numbers(dtype: torch.dtype) -> None:
    rows, bias = torch.randn(7, 48).to(dtype), torch.randn(64).to(dtype)
    weight = stacked([round_rows(torch.randn(32, 48)), round_rows(torch.randn(32, 48))])
    expected = rounded(rows).double() @ widened(weight).t() + bias.double()
    tolerance = 1e-5 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(linear(rows, weight, bias).double(), expected, rtol=0, atol=tolerance)


def test_row_with_a_number_that_is_none_spoils_no_other() -> None:
    rows, weight = torch.randn(5, 48), round_rows(torch.randn(64, 48))
    expected = linear(rows, weight)
    rows[1, 7], rows[2, 40] = float("nan"), float("inf")
    found = linear(rows, weight)
    assert found[1:3].isnan().all()
    torch.testing.assert_close(found[[0, 3, 4]], expected[[0, 3, 4]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_matrix_of_fp8_numbers_gets_the_same_numbers_again(dtype: torch.dtype) -> None:
    # Given every number of e4m3 in each row, the largest included
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = codes[codes.isfinite()].expand(9, -1)
    scales = torch.rand(9, 1) + 0.1
    weight = round_rows((numbers * scales).to(dtype))
    assert torch.equal(weight.numbers.float(), numbers)
    torch.testing.assert_close(weight.scales[0], scales[:, 0], rtol=2**-8, atol=0)


def logits_of(model: PagedModel, batch: StepBatch) -> Tensor:
    model.allocate_kv(4, 16)
    return model.logits(batch)


def test_logits_are_near_those_of_the_unrounded_model(two_layers: Path) -> None:
    batch = make_case([Spec(20, 20), Spec(3, 3)], 16).batch
    ids = torch.randint(VOCABULARY_SIZE, (batch.num_tokens,), dtype=batch.token_ids.dtype)
    batch.token_ids.copy_(ids)
    plain, fp8 = (logits_of(load(two_layers, weight_dtype), batch) for weight_dtype in ("auto", "fp8"))
    distance = relative_distance(fp8, plain)
    # Rounding changes each number by up to 1/16: 0.14 to 0.30 for eight seeds. It is 0 if nothing is rounded, and more
    # than 1 for unrelated logits.
    assert 0.005 < distance < 0.5


def test_memory_is_the_predicted_one_and_the_network_keeps_no_matrix(
    two_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    networks: list[PreTrainedModel] = []

    def load_and_keep(
        source: ModelSource, dtype: torch.dtype, device: torch.device, kept_share: float = 1.0
    ) -> tuple[PreTrainedModel, Path]:
        network, folder = load_network(source, dtype, device)
        networks.append(network)
        return network, folder

    monkeypatch.setattr("inflight.executor.model.loader.load_network", load_and_keep)
    model = load(two_layers)
    assert model.description.weight_dtype == "fp8"
    assert isinstance(model.forward, GpuForward)
    left = {name: weight for name, weight in networks[0].named_parameters() if weight.numel()}
    assert all(
        weight.ndim == 1 or name in ("model.embed_tokens.weight", "lm_head.weight") for name, weight in left.items()
    )
    matrices = [
        matrix
        for layer in model.forward.decoder._layers
        for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)
        if isinstance(matrix, Fp8Weight)
    ]
    num_bytes = sum(weight.nbytes for weight in left.values())
    num_bytes += sum(matrix.numbers.nbytes + matrix.scales.nbytes for matrix in matrices)
    assert num_bytes == fp8_weight_bytes(read_model_shape(str(two_layers)), "float32")


def test_model_with_biases_is_loaded_and_passes_the_check_against_transformers(tmp_path: Path) -> None:
    config = Qwen2Config(**sizes(num_hidden_layers=1))
    assert isinstance(load(save_model(config, tmp_path / "qwen2", has_random_vectors=True)).forward, GpuForward)


def test_fp8_checkpoint_is_computed_with_its_own_numbers(tmp_path: Path) -> None:
    folder = save_quantized(
        tmp_path / "fp8",
        "llama",
        compressed_config("float-quantized", **FP8),
        compressed("float-quantized", **FP8),
    )
    stored = load_file(folder / "model.safetensors")
    model = load(folder)
    assert isinstance(model.forward, GpuForward)
    down = model.forward.decoder._layers[0].down
    assert isinstance(down, Fp8Weight)
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(down.numbers.float(), stored[name].float())
    assert torch.equal(down.scales[0], stored[f"{name}_scale"].float().flatten())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"backend_name": "cpu"},
            "fp8 weights need the native forward pass on a GPU, and the attention backend is cpu",
        ),
        ({"forward_name": "transformers"}, "native forward pass on a GPU, and forward=transformers is set"),
        ({"weight_dtype": "int8"}, "int8 weights need .* on a CPU, and the attention backend is triton"),
    ],
)
def test_other_forward_passes_are_refused_with_the_reason(folder: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        load(folder, **options)


def test_sizes_that_matrix_units_do_not_take_are_refused(tmp_path: Path) -> None:
    folder = save_model(LlamaConfig(**sizes(num_hidden_layers=1, intermediate_size=100)), tmp_path / "odd")
    with pytest.raises(ModelError, match=r"the sizes of a matrix, \[100, 64\], are not multiples of 16"):
        load(folder)
