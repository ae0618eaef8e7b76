"""The C++ decoder's forward pass against transformers', for every instruction set of this processor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from inflight.common.model_source import ModelError, resolve_model
from inflight.executor.cpu.decoder import PARTS
from inflight.executor.cpu.streams import STREAMS
from inflight.executor.forward.native import NativeForward
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.self_check import relative_distance
from inflight.executor.step.batch import StepBatch
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE, save_model, sizes
from tests.support.device.greedy import assert_same, generate_alone, generate_together
from tests.support.device.native_builds import INSTRUCTION_SETS
from tests.support.device.paged_cases import PagedCase, Spec, make_case
from tests.support.device.torch_threads import torch_threads

# The first test of a build may wait for the compiler.
pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
FAMILY: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**sizes()),
    "llama-heads-of-32": LlamaConfig(
        **sizes(hidden_size=96, head_dim=32, num_attention_heads=6, num_key_value_heads=3)
    ),
    "llama-odd-sizes": LlamaConfig(**sizes(hidden_size=80, intermediate_size=72)),
    "llama-yarn-bias": LlamaConfig(**sizes(rope_parameters=YARN, attention_bias=True)),
    "llama-tied": LlamaConfig(**sizes(tie_word_embeddings=True)),
    "mistral-window": MistralConfig(**sizes(sliding_window=8)),
    "qwen2": Qwen2Config(**sizes()),
    "qwen3": Qwen3Config(**sizes()),
}
BEST, *OTHERS = INSTRUCTION_SETS
# What differs between builds, and with the type of weights, are vectors: their rests in odd sizes, biases, and norms.
VECTORS = ("llama-odd-sizes", "llama-yarn-bias", "qwen3")
IN_OTHER_BUILDS = [pytest.param(family, build, marks=pytest.mark.slow) for build in OTHERS for family in VECTORS]
FAMILIES_AND_BUILDS = [*((family, BEST) for family in FAMILY), *IN_OTHER_BUILDS]
# Matrices of several pieces, and steps of a depth that are prefetched in more than one.
DEEP = LlamaConfig(**sizes(hidden_size=128, intermediate_size=4800, num_hidden_layers=2))
# Relative distance of logits: rounding of bfloat16 (8 bits), and of int8 (a 1/254 of the largest of a group).
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05, "int8": 0.2}
# Each type of weights in each build. The fast tier has both sizes in the best one.
SIZES_TYPES_AND_BUILDS = [
    *(("llama-odd-sizes", "float32", BEST), ("deep", "bfloat16", BEST), ("llama-odd-sizes", "int8", BEST)),
    pytest.param("deep", "int8", BEST, marks=pytest.mark.slow),
    *(
        pytest.param(family, kind, build, marks=pytest.mark.slow)
        for build in OTHERS
        for family, kind in (("llama-odd-sizes", "float32"), ("deep", "bfloat16"), ("llama-odd-sizes", "int8"))
    ),
]
# Decodes, a chunk behind a context, and two whole prompts, one longer than what AMX and the vectors take at once.
SPECS = [Spec(1, 1), Spec(1, 37), *[Spec(1, 20)] * 8, Spec(9, 30), Spec(5, 5), Spec(70, 70)]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(FAMILY[request.param], tmp_path_factory.mktemp("models") / request.param)


def load(folder: Path, **options: Any) -> PagedModel:
    options = {"dtype_name": "float32", "backend_name": "cpu", "device_name": "cpu"} | options
    return load_model(resolve_model(str(folder)), **options)


def filled_case(block_size: int = 16, specs: list[Spec] = SPECS) -> PagedCase:
    case = make_case(specs, block_size)
    generator = torch.Generator().manual_seed(5)
    for batch in (case.history, case.batch):
        batch.token_ids.copy_(torch.randint(VOCABULARY_SIZE, batch.token_ids.shape, generator=generator))
    return case


def logits_of(model: PagedModel, case: PagedCase) -> Tensor:
    """Logits of the case's batch, whose KV pool held not-a-number where nothing was written."""
    model.allocate_kv(case.num_blocks, case.batch.block_size)
    for kv in model.kv:
        kv.values.fill_(float("nan"))
    model.logits(case.history)
    return model.logits(case.batch)


def greedy_ids(model: PagedModel, batch: StepBatch) -> Tensor:
    assert isinstance(model.forward, NativeForward)
    return model.forward.decoder.greedy(batch, model.kv)


@pytest.mark.parametrize(("folder", "instructions"), FAMILIES_AND_BUILDS, indirect=["folder"])
def test_logits_are_those_of_transformers_modules(folder: Path, instructions: str) -> None:
    case = filled_case()
    expected = logits_of(load(folder, forward_name="transformers"), case)

    model = load(folder, instructions=instructions)

    assert isinstance(model.forward, NativeForward)
    assert relative_distance(logits_of(model, case), expected) < TOLERANCE["float32"]
    assert greedy_ids(model, case.batch).tolist() == model.logits(case.batch).argmax(-1).tolist()


@pytest.mark.parametrize(
    ("folder", "instructions"), [*((family, BEST) for family in VECTORS), *IN_OTHER_BUILDS], indirect=["folder"]
)
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_rounded_weights_stay_near_float32(folder: Path, instructions: str, kind: str) -> None:
    case = filled_case(block_size=32)
    expected = logits_of(load(folder), case)
    options = {"dtype_name": "bfloat16"} | ({"weight_dtype": "int8"} if kind == "int8" else {})

    logits = logits_of(load(folder, instructions=instructions, **options), case)

    assert 0 < relative_distance(logits, expected) < TOLERANCE[kind]


@pytest.mark.parametrize(("family", "kind", "instructions"), SIZES_TYPES_AND_BUILDS)
def test_logits_do_not_depend_on_how_weights_are_read(
    tmp_path: Path, family: str, kind: str, instructions: str
) -> None:
    """Bit by bit, for steps of 1 to 81 rows: every size of a vector unit's group of rows, and more than one tile. Nor
    on the number of threads."""
    folder = save_model(DEEP if family == "deep" else FAMILY[family], tmp_path / "tiny")
    options = {"weight_dtype": "int8", "dtype_name": "bfloat16"} if kind == "int8" else {"dtype_name": kind}
    specs = [*([Spec(1, 20)] * count for count in (1, 4, 5, 12, 13, 16, 25, 32)), SPECS]
    cases = [filled_case(specs=each) for each in specs]

    expected: list[Tensor] = []
    for number, stream in enumerate(STREAMS):
        with torch_threads(1 + number % 2):
            model = load(folder, instructions=instructions, weight_stream=stream, **options)
        logits = [logits_of(model, case) for case in cases]
        expected = expected or logits
        assert all(torch.equal(found, wanted) for found, wanted in zip(logits, expected, strict=True)), stream


@pytest.mark.parametrize("folder", ["llama-odd-sizes", "qwen3"], indirect=True)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_logits_do_not_depend_on_which_rows_have_some(folder: Path, kind: str) -> None:
    """Bit by bit, in any order and twice; and so does KV of steps in which no row has any."""
    options = {"weight_dtype": "int8", "dtype_name": "bfloat16"} if kind == "int8" else {"dtype_name": kind}
    model, case = load(folder, **options), filled_case()
    num_rows = len(case.batch.token_ids)
    whole = replace(case, batch=replace(case.batch, logit_rows=torch.arange(num_rows)))
    expected = logits_of(model, whole)
    for rows in ([num_rows - 1, 3, 40, 3], [num_rows - 70], list(range(1, num_rows))):
        logits = model.logits(replace(case.batch, logit_rows=torch.tensor(rows)))
        assert torch.equal(logits, expected[rows])

    for kv in model.kv:
        kv.keys.zero_()
        kv.values.zero_()
    assert len(model.logits(replace(case.history, logit_rows=torch.zeros(0, dtype=torch.int64)))) == 0
    assert torch.equal(model.logits(whole.batch), expected)


@pytest.mark.parametrize("folder", ["llama", "llama-yarn-bias", "mistral-window"], indirect=True)
def test_tokens_are_those_of_transformers(folder: Path) -> None:
    network: Any = AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCABULARY_SIZE, (n,), generator=generator).tolist() for n in (3, 40, 17, 1)]

    together = generate_together(load(folder), prompts, num_tokens=20, chunk_tokens=11)

    for output_ids, prompt in zip(together, prompts, strict=True):
        assert_same(output_ids, generate_alone(network, prompt, 20))


def test_int8_weights_take_half_the_memory(tmp_path: Path) -> None:
    folder = save_model(DEEP, tmp_path / "tiny")
    whole, narrow = (load(folder, dtype_name="bfloat16", weight_dtype=kind).forward for kind in ("auto", "int8"))
    assert isinstance(whole, NativeForward)
    assert isinstance(narrow, NativeForward)
    assert narrow.decoder.num_matrix_bytes * 1.8 < whole.decoder.num_matrix_bytes


def test_int8_weights_of_another_model_are_refused_with_the_reason(tmp_path: Path) -> None:
    folder = save_model(FAMILY["llama"], tmp_path / "tiny")
    with pytest.raises(ModelError, match="int8 weights need the native forward pass on a CPU"):
        load(folder, weight_dtype="int8", forward_name="transformers")


def test_time_of_each_part_is_kept(tmp_path: Path) -> None:
    model = load(save_model(FAMILY["llama"], tmp_path / "tiny"))
    assert isinstance(model.forward, NativeForward)
    logits_of(model, filled_case())
    assert len(model.forward.decoder.part_seconds) == len(PARTS)
    assert (model.forward.decoder.part_seconds[: PARTS.index("exchange")] > 0).all()
    assert model.forward.decoder.part_seconds[PARTS.index("exchange")] == 0
