"""gpt-oss on the GPU path under Triton's interpreter, and on CPUs, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from inflight.common.model_source import ModelError, resolve_model
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.forward.native import NativeForward
from inflight.executor.forward.transformers import TransformersForward
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.products.coded import CodedMatrix
from inflight.executor.scheduler.sequence import PlanRow, Sequence, StepPlan
from inflight.executor.step.batch import pack
from inflight.tools.sizing.arithmetic import Machine, pool_of
from inflight.tools.sizing.model_shape import read_model_shape
from tests.support.checkpoints.gpt_oss import WINDOW, save_gpt_oss, save_mxfp4
from tests.support.device.paged_cases import make_sequence

BLOCK_SIZE = 16
DENSE = {"weight_dtype": "dense"}
# Three windows and a half, and one that a window holds.
PROMPTS = [[(7 * place + 3) % 96 for place in range(3 * WINDOW + 4)], [40, 3, 11]]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gpt_oss(tmp_path_factory.mktemp("gpt-oss") / "dense")


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mxfp4(tmp_path_factory.mktemp("gpt-oss") / "mxfp4")


def load(folder: Path, backend_name: str, **options: Any) -> PagedModel:
    source = resolve_model(str(folder))
    return load_model(source, dtype_name="float32", backend_name=backend_name, device_name="cpu", **options)


def logits_of(model: PagedModel, sequences: list[Sequence], lengths: list[int]) -> list[Tensor]:
    """The logits behind every chunk of `lengths` tokens of each prompt, all prompts in one step."""
    model.allocate_kv(8, BLOCK_SIZE)
    found: list[list[Tensor]] = [[] for _ in sequences]
    while any(one.num_computed < one.num_tokens for one in sequences):
        rows = [
            PlanRow(one, one.num_computed, min(length, one.num_tokens - one.num_computed), True)
            for one, length in zip(sequences, lengths, strict=True)
            if one.num_computed < one.num_tokens
        ]
        rows.sort(key=lambda row: row.num_tokens != 1)
        for row, logits in zip(rows, model.logits(pack(StepPlan.of(rows), BLOCK_SIZE)), strict=True):
            row.sequence.num_computed += row.num_tokens
            found[sequences.index(row.sequence)].append(logits.clone())
    return [torch.stack(of_one) for of_one in found]


def sequences() -> list[Sequence]:
    return [make_sequence(list(PROMPTS[0]), [2, 5]), make_sequence(list(PROMPTS[1]), [3])]


def expected(folder: Path) -> list[Tensor]:
    """The logits of every position by transformers."""
    network: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return [network(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]


@pytest.mark.parametrize("lengths", [[5, 3], [1, 1], [28, 2]], ids=str)
@pytest.mark.parametrize("backend", ["triton", "cpu", "reference"])
def test_logits_are_those_of_transformers(dense: Path, backend: str, lengths: list[int]) -> None:
    model = load(dense, backend)
    forwards: dict[str, type[Any]] = {"triton": GpuForward, "cpu": NativeForward, "reference": TransformersForward}
    assert isinstance(model.forward, forwards[backend])
    for found, wanted, length in zip(logits_of(model, sequences(), lengths), expected(dense), lengths, strict=True):
        ends = [*range(length, len(wanted), length), len(wanted)]
        assert float((found - wanted[[end - 1 for end in ends]]).abs().max()) <= 1e-4


def test_experts_of_a_row_have_the_same_bits_alone_and_in_company(mxfp4: Path) -> None:
    # Products of torch with other numbers of rows have not; those of attention are in test_triton_attention.py.
    model = load(mxfp4, "triton")
    assert isinstance(model.forward, GpuForward)
    experts = model.forward.decoder._layers[0].experts
    assert experts is not None
    hidden = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    together = experts.compute(hidden, None, lambda part: part)
    for count in (1, 4):
        assert torch.equal(experts.compute(hidden[:count], None, lambda part: part), together[:count])


def test_experts_in_mxfp4_stay_as_in_the_checkpoint(mxfp4: Path) -> None:
    # Loading compares each layer with that of transformers' modules, and the logits.
    model = load(mxfp4, "triton")
    assert isinstance(model.forward, GpuForward)
    assert model.description.weight_dtype == "quantized"
    for layer in model.forward.decoder._layers:
        assert layer.experts is not None
        for product in (layer.experts.gate_up, layer.experts.down):
            assert isinstance(product.matrix, CodedMatrix)
            # A byte for two numbers, and one for each group of 32.
            assert product.num_bytes == product.matrix.shape.numel() * 17 // 32
    # Which is what is predicted for a GPU.
    stored = load_file(mxfp4 / "model.safetensors")
    dense_bytes = 4 * sum(one.numel() for name, one in stored.items() if not name.endswith(("_blocks", "_scales")))
    coded_bytes = sum(one.numel() for name, one in stored.items() if name.endswith(("_blocks", "_scales")))
    predicted = pool_of(read_model_shape(str(mxfp4)), Machine(1 << 40, True, 0.9, 0), "float32", 16).weight_bytes
    assert predicted == pytest.approx(dense_bytes + coded_bytes, rel=0.01)
    found = logits_of(model, sequences(), [6, 2])[0]
    wanted = expected(mxfp4.with_name("mxfp4-dense"))[0]
    assert float((found - wanted[[5, 11, 17, 23, 27]]).abs().max()) <= 1e-4


def test_experts_in_mxfp4_stay_coded_on_a_cpu(mxfp4: Path) -> None:
    model = load(mxfp4, "cpu")
    assert isinstance(model.forward, NativeForward)
    assert model.description.weight_dtype == "quantized"
    # Half a byte for a number and one for each group of 32, where dense ones have four for a number.
    expanded = load(mxfp4, "cpu", weight_dtype="dense")
    assert isinstance(expanded.forward, NativeForward)
    experts = sum(one.numel() * 2 for name, one in load_file(mxfp4 / "model.safetensors").items() if "_blocks" in name)
    saved = expanded.forward.decoder.num_matrix_bytes - model.forward.decoder.num_matrix_bytes
    assert saved > 3.2 * experts
    found = logits_of(model, sequences(), [5, 1])[0]
    wanted = expected(mxfp4.with_name("mxfp4-dense"))[0]
    assert float((found - wanted[[4, 9, 14, 19, 24, 27]]).abs().max()) <= 1e-4


@pytest.mark.parametrize(
    ("backend", "options"),
    [("reference", {}), ("cpu", {"forward_name": "transformers"}), *((one, DENSE) for one in ("cpu", "triton"))],
)
def test_experts_in_mxfp4_are_expanded(mxfp4: Path, backend: str, options: dict[str, Any]) -> None:
    model = load(mxfp4, backend, **options)
    assert model.description.weight_dtype == "float32"
    found = logits_of(model, sequences(), [28, 3])[0]
    assert float((found - expected(mxfp4.with_name("mxfp4-dense"))[0][-1:]).abs().max()) <= 1e-4


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("gate_up_proj_scales", lambda scales: scales.fill_(255), "gate_up_proj_scales has scales that are not finite"),
        ("down_proj_scales", lambda scales: scales[:, :-1], r"down_proj_scales has the shape \[5, 63, 3\] instead of"),
        ("down_proj_blocks", lambda blocks: blocks.to(torch.int32), "down_proj_blocks is of int32 instead of uint8"),
        ("down_proj_scales", None, "down_proj_scales is missing"),
    ],
)
def test_damaged_experts_are_refused_by_tensor(
    mxfp4: Path, tmp_path: Path, name: str, change: Any, reason: str
) -> None:
    tensors = load_file(mxfp4 / "model.safetensors")
    full_name = f"model.layers.1.mlp.experts.{name}"
    tensor = tensors.pop(full_name)
    if change is not None:
        tensors[full_name] = change(tensor).contiguous()
    for path in mxfp4.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=reason):
        load(tmp_path, "reference")
