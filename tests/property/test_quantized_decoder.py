"""The C++ decoder with quantized matrices against transformers with the dequantized ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, Olmo2Config, Phi3Config, PretrainedConfig

from inflight.common.model_source import ModelError, ModelSource, resolve_model
from inflight.executor.adapters.peft_files import parse, read_files
from inflight.executor.adapters.weights import AdapterLimits
from inflight.executor.checkpoint.quantized_linear import QuantizedLinear, make_dense
from inflight.executor.checkpoint.quantized_weight import QuantizedWeight, pack_halves
from inflight.executor.checkpoint.rounding import round_linears
from inflight.executor.formats.loading import load_network
from inflight.executor.forward.native import NativeForward
from inflight.executor.model.model import PagedModel
from inflight.executor.model.self_check import relative_distance
from tests.property.test_native_decoder import filled_case, load, logits_of
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE, save_model, sizes
from tests.support.device.greedy import assert_same, generate_alone, generate_together
from tests.support.device.native_builds import INSTRUCTION_SETS
from tests.support.device.torch_threads import torch_threads
from tests.unit.test_adapter_logits import logits_of as adapted_logits_of
from tests.unit.test_adapter_logits import peft_adapter

# The first test of a build may wait for the compiler.
pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]

MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**sizes(hidden_size=128, intermediate_size=192, tie_word_embeddings=True)),
    # Blocks that are not full, and depths that are no multiple of what is unpacked at once
    "odd-sizes-bias": LlamaConfig(**sizes(hidden_size=80, intermediate_size=208, attention_bias=True)),
    "olmo2": Olmo2Config(**sizes(intermediate_size=320)),
    "fused-parts": Phi3Config(**sizes(intermediate_size=80)),
}
# Bits, groups (0: the row) and whether columns are permuted. Layers that no entry names stay as they are.
FORMATS: dict[str, tuple[int, int, bool]] = {
    "q_proj": (4, 16, True),
    "k_proj": (8, 0, False),
    "o_proj": (4, 32, True),
    "gate_proj": (8, 16, True),
    "up_proj": (4, 0, False),
    "down_proj": (4, 16, True),
    "lm_head": (8, 16, False),
    "qkv_proj": (4, 32, True),
    "gate_up_proj": (8, 16, False),
}
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
BEST, *OTHERS = INSTRUCTION_SETS
# Products of the other builds are those of test_coded_products, in all formats.
MODELS_AND_BUILDS = [
    *((name, BEST) for name in MODELS),
    *(pytest.param("odd-sizes-bias", build, marks=pytest.mark.slow) for build in OTHERS),
]


def quantize(name: str, linear: nn.Linear, generator: torch.Generator) -> QuantizedLinear | None:
    bits, group_size, has_order = FORMATS.get(name.rpartition(".")[2], (0, 0, False))
    if not bits:
        return None
    weight = linear.weight.detach().float()
    size = group_size or weight.shape[1]
    order = torch.randperm(weight.shape[1], generator=generator).to(torch.int32) if has_order else None
    groups = (weight if order is None else weight[:, order.long()]).unflatten(1, (-1, size))
    offset = groups.amin(-1)
    scale = (groups.amax(-1) - offset) / (2**bits - 1)
    codes = ((groups - offset[..., None]) / scale[..., None]).round().flatten(1).to(torch.uint8)
    packed = pack_halves(codes) if bits == 4 else codes
    bias: Any = linear.bias
    return QuantizedLinear(QuantizedWeight(packed, scale, offset, bits, size, order), bias)


@pytest.fixture(scope="module", params=MODELS)
def dense_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with numbers that bfloat16 has."""
    folder = save_model(MODELS[request.param], tmp_path_factory.mktemp("models") / request.param)
    network: Any = AutoModelForCausalLM.from_pretrained(str(folder))
    network.bfloat16().float().save_pretrained(str(folder))
    return folder


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets models be loaded with quantized layers, the same for every dtype."""
    monkeypatch.setattr("inflight.executor.model.loader.load_network", load_quantized)


def load_quantized(
    source: ModelSource, dtype: torch.dtype, device: torch.device, kept_share: float = 1.0
) -> tuple[Any, Path]:
    loaded, folder = load_network(source, torch.float32, device)
    network: Any = loaded
    generator = torch.Generator().manual_seed(0)
    for name, module in [*network.named_modules()]:
        if type(module) is nn.Linear and (layer := quantize(name, module, generator)) is not None:
            network.set_submodule(name, layer)
    return network.to(dtype), folder


@pytest.fixture
def reference_folder(dense_folder: Path, quantized: None, tmp_path: Path) -> Path:
    """The model whose matrices are dequantized."""
    network, _ = load_quantized(resolve_model(str(dense_folder)), torch.float32, torch.device("cpu"))
    make_dense(network, torch.float32)
    network.config.tie_word_embeddings = False
    network.save_pretrained(str(tmp_path / "reference"))
    return tmp_path / "reference"


@pytest.mark.parametrize(("dense_folder", "instructions"), MODELS_AND_BUILDS, indirect=["dense_folder"])
def test_logits_are_those_of_the_dequantized_model(
    dense_folder: Path, reference_folder: Path, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = filled_case()
    models = [load(dense_folder, dtype_name=dtype, instructions=instructions) for dtype in TOLERANCE]
    monkeypatch.undo()
    expected = logits_of(load(reference_folder, forward_name="transformers"), case)

    for model, (dtype, tolerance) in zip(models, TOLERANCE.items(), strict=True):
        assert isinstance(model.forward, NativeForward)
        logits = logits_of(model, case)
        assert relative_distance(logits, expected) < tolerance, dtype
        assert model.forward.decoder.greedy(case.batch, model.kv).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("dense_folder", ["llama", "fused-parts"], indirect=True)
def test_tokens_are_those_of_the_dequantized_model(dense_folder: Path, reference_folder: Path) -> None:
    network: Any = AutoModelForCausalLM.from_pretrained(str(reference_folder), attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCABULARY_SIZE, (n,), generator=generator).tolist() for n in (3, 40, 17)]

    together = generate_together(load(dense_folder), prompts, num_tokens=12, chunk_tokens=11)

    for output_ids, prompt in zip(together, prompts, strict=True):
        assert_same(output_ids, generate_alone(network, prompt, 12))


@pytest.mark.usefixtures("quantized")
@pytest.mark.parametrize("dense_folder", ["odd-sizes-bias", "fused-parts"], indirect=True)
def test_logits_are_the_same_for_every_number_of_threads(dense_folder: Path) -> None:
    case, logits = filled_case(), []
    for num_threads in (1, 2, 3):
        with torch_threads(num_threads):
            logits.append(logits_of(load(dense_folder, dtype_name="bfloat16"), case))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


@pytest.mark.usefixtures("quantized")
@pytest.mark.parametrize("dense_folder", ["llama"], indirect=True)
@pytest.mark.parametrize(("weight_dtype", "largest"), [("int8", 0.4), ("quantized_a8", 0.1)])
def test_products_with_rounded_rows_are_near_those_of_the_dequantized_weights(
    dense_folder: Path, weight_dtype: str, largest: float
) -> None:
    case = filled_case()
    expected = logits_of(load(dense_folder), case)
    logits = logits_of(load(dense_folder, weight_dtype=weight_dtype), case)
    assert 0 < relative_distance(logits, expected) < largest


@pytest.mark.parametrize("dense_folder", ["llama"], indirect=True)
@pytest.mark.filterwarnings("ignore")
def test_adapters_are_added_to_quantized_matrices(dense_folder: Path, reference_folder: Path, tmp_path: Path) -> None:
    targets = {"r": 8, "target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]}
    merged = peft_adapter(reference_folder, tmp_path / "adapter", targets)
    ids = [3, 7, 1, 20, 55, 90, 13, 4, 4, 61, 17, 33]
    with torch.inference_mode():
        wanted: Tensor = merged(torch.tensor([ids])).logits[0, -1]

    model: PagedModel = load(dense_folder)
    assert isinstance(model.forward, NativeForward)
    model.allocate_kv(4, 16)
    model.forward.decoder.reserve_adapters(2, 8)
    model.forward.decoder.load_adapter(
        1, parse(read_files(tmp_path / "adapter"), AdapterLimits(model.forward.decoder.form.shape, 8))
    )
    logits = adapted_logits_of(model, ids)

    assert float((logits - wanted).norm() / wanted.norm()) < 1e-4


@pytest.mark.parametrize("dense_folder", ["llama"], indirect=True)
def test_int4_is_a_third_of_the_memory_and_the_network_rounded_at_load(dense_folder: Path) -> None:
    case = filled_case()
    network, _ = load_network(resolve_model(str(dense_folder)), torch.float32, torch.device("cpu"))
    assert round_linears(network) == 2 * 7 + 1

    plain, rounded = (load(dense_folder, dtype_name="bfloat16", weight_dtype=kind) for kind in ("auto", "int4"))
    exact = load(dense_folder, weight_dtype="int4")

    assert rounded.description.weight_dtype == "int4"
    assert isinstance(plain.forward, NativeForward)
    assert isinstance(rounded.forward, NativeForward)
    assert rounded.forward.decoder.num_matrix_bytes * 2.5 < plain.forward.decoder.num_matrix_bytes
    assert relative_distance(logits_of(rounded, case), logits_of(exact, case)) < TOLERANCE["bfloat16"]
    assert relative_distance(logits_of(exact, case), logits_of(plain, case)) > TOLERANCE["bfloat16"]


@pytest.mark.usefixtures("quantized")
@pytest.mark.parametrize("dense_folder", ["llama"], indirect=True)
def test_int4_of_a_quantized_checkpoint_is_refused(dense_folder: Path) -> None:
    with pytest.raises(ModelError, match="int4 is for models that are not quantized"):
        load(dense_folder, weight_dtype="int4")


@pytest.mark.parametrize("dense_folder", ["llama"], indirect=True)
def test_int4_without_native_forward_pass_is_refused(dense_folder: Path) -> None:
    with pytest.raises(ModelError, match="int4 weights need the native forward pass on a CPU"):
        load(dense_folder, weight_dtype="int4", forward_name="transformers")
