"""Layers of experts on a GPU, under Triton's interpreter: choice, order, products, and whole models of each family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    Glm4MoeConfig,
    GraniteMoeConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from triton.runtime.interpreter import GridExecutor

from inflight.common.model_source import resolve_model
from inflight.executor.checkpoint.decoder_weights import SILU, SQUARED_RELU, DecoderShape, Rope, Routing
from inflight.executor.experts.layer import ExpertLayer
from inflight.executor.experts.products import Activation, GroupedProduct
from inflight.executor.experts.tiling import expert_tiling
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.model import self_check
from inflight.executor.model.loader import load_model
from inflight.executor.model.runner import ModelRunner
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.scheduler import Scheduler
from tests.kernels.test_gpu_runner import (
    BLOCK_SIZE,
    LIMITS,
    NUM_BLOCKS,
    assert_same_sequences,
    gpu_runner,
    load,
    outputs,
    requests,
)
from tests.support.checkpoints.tiny_models import save_model, sizes

# Neither is a multiple of a tile.
HIDDEN, INNER = 44, 23
# Of models; transformers multiplies rows of multiples of 16 bytes only.
WIDTH = 20
GLM = {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "routed_scaling_factor": 1.5}
FAMILY: dict[str, PretrainedConfig] = {
    "qwen3-moe": Qwen3MoeConfig(
        **sizes(num_hidden_layers=1, num_experts=7, moe_intermediate_size=WIDTH, head_dim=32),
        num_experts_per_tok=3,
        norm_topk_prob=True,
    ),
    "qwen2-moe-with-a-dense-layer": Qwen2MoeConfig(
        **sizes(num_experts=5, moe_intermediate_size=WIDTH, shared_expert_intermediate_size=36, mlp_only_layers=[0]),
        num_experts_per_tok=2,
    ),
    "mixtral": MixtralConfig(**sizes(num_hidden_layers=1, num_local_experts=3, num_experts_per_tok=2)),
    "glm4-moe": Glm4MoeConfig(
        **sizes(**GLM, moe_intermediate_size=WIDTH, first_k_dense_replace=1, partial_rotary_factor=0.5),
        num_experts_per_tok=3,
        use_qk_norm=True,
        attention_bias=True,
    ),
    "glm4-moe-without-norms-and-groups": Glm4MoeConfig(
        **sizes(n_routed_experts=5, moe_intermediate_size=WIDTH, first_k_dense_replace=0, num_hidden_layers=1),
        num_experts_per_tok=2,
    ),
    "minimax-m2": MiniMaxM2Config(
        **sizes(num_hidden_layers=1, num_local_experts=6, num_experts_per_tok=2, rotary_dim=8)
    ),
    "olmoe": OlmoeConfig(**sizes(num_hidden_layers=1, num_experts=6, num_experts_per_tok=3)),
    "granite-moe": GraniteMoeConfig(
        **sizes(num_hidden_layers=1, num_local_experts=6, embedding_multiplier=3.0, residual_multiplier=0.5),
        num_experts_per_tok=2,
        attention_multiplier=0.1,
        logits_scaling=4.0,
    ),
    "phi3-partial-rotary": Phi3Config(**sizes(num_hidden_layers=1, partial_rotary_factor=0.5)),
}


@pytest.mark.parametrize("name", FAMILY)
def test_logits_in_chunks_and_decodes_are_those_of_transformers(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Loading a model compares them.
    monkeypatch.setitem(self_check.TOLERANCE, torch.float32, 1e-4)
    folder = save_model(FAMILY[name], tmp_path / name, has_random_vectors=True)
    source = resolve_model(str(folder))
    assert isinstance(load_model(source, dtype_name="float32", backend_name="triton").forward, GpuForward)


@pytest.mark.parametrize("name", ["qwen3-moe", "glm4-moe"])
def test_sequences_are_those_of_the_generic_runner(tmp_path: Path, name: str) -> None:
    folder = save_model(FAMILY[name], tmp_path / name, has_random_vectors=True)
    # Given a greedy prompt of two chunks, and a decode beside it
    expected, ours = requests()[:2], requests()[:2]
    scheduler = Scheduler(LIMITS, BlockPool(NUM_BLOCKS, BLOCK_SIZE))
    outputs(ModelRunner(load(folder, "reference"), LIMITS, BLOCK_SIZE), expected, scheduler, num_ahead=0)
    outputs(gpu_runner(folder), ours)
    assert_same_sequences(ours, expected)


# --- a layer


def shape_of(num_experts: int, num_chosen: int, routing: Routing = Routing(), **changes: Any) -> DecoderShape:  # noqa: B008 - immutable
    shape = DecoderShape(
        1, HIDDEN, 1, 1, 16, INNER, 96, 1e-5, 1.0, (None,), (Rope((1.0,) * 8, 1.0),), (0,),
        num_experts=num_experts, num_experts_per_token=num_chosen, normalizes_experts=True, routing=routing,
    )  # fmt: skip
    return replace(shape, **changes)


def layer_of(shape: DecoderShape, *, has_correction: bool = False, num_scores: int | None = None) -> ExpertLayer:
    """A layer with random weights."""
    generator = torch.Generator().manual_seed(shape.num_experts)
    activation = Activation.of(shape)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    return ExpertLayer(
        shape,
        random(num_scores or shape.num_experts, HIDDEN),
        random(shape.num_experts) if has_correction else None,
        GroupedProduct(
            0.2 * random(shape.num_experts, (1 + activation.has_gates) * INNER, HIDDEN), shape.num_experts, activation
        ),
        GroupedProduct(0.2 * random(shape.num_experts, HIDDEN, INNER), shape.num_experts),
    )


def rows_of(count: int) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1))


def compute(layer: ExpertLayer, hidden: Tensor, shared: Tensor | None = None) -> Tensor:
    return layer.compute(hidden, shared, lambda part: part)


def expected_choice(layer: ExpertLayer, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Experts and weights by torch, in the order of the weights with corrections."""
    shape, routing = layer.shape, layer.shape.routing
    scores = (hidden @ layer.router.T)[:, : shape.num_experts]
    weights = scores.sigmoid() if routing.has_sigmoid else scores.softmax(-1)
    ranks = weights if layer.correction is None else weights + layer.correction
    groups = ranks.view(len(hidden), routing.num_groups, -1)
    if routing.num_groups > 1:
        best = groups.topk(2, -1).values.sum(-1).topk(routing.num_chosen_groups, -1).indices
        is_open = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter_(1, best, True)
        ranks = groups.masked_fill(~is_open[..., None], float("-inf")).flatten(1)
    experts = ranks.topk(shape.num_experts_per_token, -1).indices
    weights = weights.gather(1, experts)
    if shape.normalizes_experts:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts, weights * routing.scale


GROUPS = Routing(has_sigmoid=True, num_groups=3, num_chosen_groups=2, scale=2.5)
CHOICES: dict[str, tuple[DecoderShape, bool]] = {
    "softmax": (shape_of(11, 3), False),
    "softmax-of-all": (shape_of(11, 3, normalizes_experts=False), False),
    "sigmoid-with-correction": (shape_of(11, 3, Routing(has_sigmoid=True)), True),
    "groups": (shape_of(15, 4, GROUPS), True),
    "groups-without-correction": (shape_of(15, 4, GROUPS), False),
    "all-experts": (shape_of(4, 4), False),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choice_is_that_of_torch(name: str) -> None:
    shape, has_correction = CHOICES[name]
    layer, hidden = layer_of(shape, has_correction=has_correction), rows_of(19)
    choice = layer.choose(hidden)
    experts, weights = expected_choice(layer, hidden)
    assert torch.equal(choice.experts.long(), experts)
    torch.testing.assert_close(choice.weights, weights, rtol=1e-5, atol=1e-6)


def test_of_equal_experts_the_first_are_chosen() -> None:
    layer = layer_of(shape_of(6, 3))
    layer.router.zero_()
    assert layer.choose(rows_of(2)).experts.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("of", ["random", "one", "last", "few"])
def test_every_pair_is_in_one_tile_of_its_expert(of: str) -> None:
    num_experts, num_rows = 5, {"few": 3}.get(of, 40)
    layer = layer_of(shape_of(num_experts, 3))
    experts = torch.randint(num_experts, (num_rows, 3), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    experts = {"one": torch.full_like(experts, 2), "last": torch.full_like(experts, 4)}.get(of, experts)
    tiles = layer.order(experts, 2)
    assert not tiles.tiling.by_pair
    lanes = tiles.pairs.view(-1, tiles.tiling.rows).tolist()
    found: list[tuple[int, int]] = []
    for expert, lane in zip(tiles.experts.tolist(), lanes, strict=True):
        of_tile = [] if expert < 0 else [pair for pair in lane if pair >= 0]
        assert expert < 0 or of_tile == lane[: len(of_tile)] != []
        found += [(expert, pair) for pair in of_tile]
    assert found == sorted((expert, pair) for pair, expert in enumerate(experts.flatten().tolist()))


@pytest.mark.parametrize("num_experts", [1, 4, 128])
@pytest.mark.parametrize("num_pairs", [1, 8, 33, 700, 20_000])
def test_tiles_suffice_for_any_division_of_the_pairs(num_experts: int, num_pairs: int) -> None:
    tiling = expert_tiling(num_pairs, num_experts, 2)
    most = tiling.num_tiles(num_pairs, num_experts)
    if tiling.by_pair:
        assert most == num_pairs
        return
    # The most tiles are begun if every expert but one has as few pairs beyond whole tiles as possible: one.
    ones = min(num_pairs, num_experts)
    uneven = [1 + (num_pairs - ones) * (expert == 0) for expert in range(ones)]
    begun = sum(-(-count // tiling.rows) for count in uneven)
    spread = [num_pairs // num_experts + (expert < num_pairs % num_experts) for expert in range(num_experts)]
    assert max(begun, sum(-(-count // tiling.rows) for count in spread)) <= most
    assert most <= num_pairs // tiling.rows + ones


def expected_outputs(layer: ExpertLayer, hidden: Tensor) -> Tensor:
    """The sums of the experts' outputs, in float64."""
    experts, weights = expected_choice(layer, hidden)
    gate_up, down = (dense_of(one).double()[experts] for one in (layer.gate_up, layer.down))
    inner = torch.einsum("rkoi,ri->rko", gate_up, hidden.double())
    if layer.shape.activation == SQUARED_RELU:
        inner = functional.relu(inner).square()
    else:
        gate, up = inner.chunk(2, -1)
        inner = functional.silu(gate) * up
    products = torch.einsum("rkoi,rki->rko", down, inner)
    return (products * weights[..., None]).sum(1)


# Steps whose pairs are tiles of their own, and those with tiles of 16, 64 and 128 rows.
@pytest.mark.parametrize(("num_experts", "num_rows"), [(24, 3), (6, 9), (3, 25), (2, 66)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_layer_is_that_of_torch(num_experts: int, num_rows: int, dtype: torch.dtype) -> None:
    assert_is_that_of_torch(num_experts, num_rows, dtype, torch.device("cpu"))


@pytest.mark.parametrize(("num_experts", "num_rows"), [(24, 3), (3, 25)])
def test_layer_without_gates_is_that_of_torch(num_experts: int, num_rows: int) -> None:
    assert_is_that_of_torch(num_experts, num_rows, torch.float32, torch.device("cpu"), SQUARED_RELU)


def assert_is_that_of_torch(
    num_experts: int, num_rows: int, dtype: torch.dtype, device: torch.device, activation: str = SILU
) -> None:
    """A layer of two experts a row yields what torch computes of the same weights in float64."""
    shape = shape_of(num_experts, 2, activation=activation)
    layer, hidden = placed(layer_of(shape), dtype, device), rows_of(num_rows).to(device, dtype)
    # Numbers are around 1; bfloat16 has 8 bits, float16 11, and both are used four times.
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3}.get(dtype, 5e-2)
    expected = expected_outputs(placed(layer, torch.float32, device), hidden.float())
    torch.testing.assert_close(compute(layer, hidden).double(), expected, rtol=tolerance, atol=tolerance)


def placed(layer: ExpertLayer, dtype: torch.dtype, device: torch.device) -> ExpertLayer:
    gate_up, down = (replace(one, matrix=dense_of(one).to(device, dtype)) for one in (layer.gate_up, layer.down))
    return replace(layer, router=layer.router.to(device, dtype), gate_up=gate_up, down=down)


def dense_of(product: GroupedProduct) -> Tensor:
    assert isinstance(product.matrix, Tensor)
    return product.matrix


def test_shared_expert_is_added_times_the_sigmoid_of_its_score() -> None:
    layer, hidden = layer_of(shape_of(6, 2), num_scores=7), rows_of(5)
    shared = torch.randn(5, HIDDEN)
    without, gate = compute(layer, hidden), (hidden @ layer.router[6]).sigmoid()
    torch.testing.assert_close(compute(layer, hidden, shared), without + gate[:, None] * shared, rtol=1e-4, atol=1e-5)
    ungated = replace(layer, router=layer.router[:6].contiguous())
    torch.testing.assert_close(compute(ungated, hidden, shared), without + shared, rtol=1e-4, atol=1e-5)


# Tiles of one pair and of 16 rows alone, and of 16 or 64 in company.
@pytest.mark.parametrize("num_together", [4, 13, 75])
def test_row_has_the_same_bits_alone_and_in_company(num_together: int) -> None:
    assert_same_bits(num_together, torch.float32, torch.device("cpu"))


def assert_same_bits(num_together: int, dtype: torch.dtype, device: torch.device) -> None:
    """Some rows of a step have the same bits alone."""
    layer, hidden = placed(layer_of(shape_of(13, 3)), dtype, device), rows_of(num_together).to(device, dtype)
    together = compute(layer, hidden)
    for row in (0, num_together // 2, num_together - 1):
        assert torch.equal(compute(layer, hidden[row : row + 1])[0], together[row])


def test_row_that_is_not_a_number_leaves_the_others_alone() -> None:
    layer, hidden = layer_of(shape_of(15, 4, GROUPS), has_correction=True), rows_of(9)
    expected = compute(layer, hidden)
    broken = hidden.clone()
    broken[3] = float("nan")
    found = compute(layer, broken)
    assert found[3].isnan().all()
    others = [0, 1, 2, 4, 5, 6, 7, 8]
    assert torch.equal(found[others], expected[others])


class Grids:
    """The launches of Triton's kernels: their grids."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.grids: list[Any] = []
        call = GridExecutor.__call__

        def launch(executor: Any, *arguments: Any, **options: Any) -> Any:
            self.grids.append(executor.grid)
            return call(executor, *arguments, **options)

        monkeypatch.setattr(GridExecutor, "__call__", launch)


@pytest.mark.parametrize(("num_rows", "most"), [(1, 5), (9, 6)])
def test_launches_and_their_sizes_do_not_depend_on_the_choice(
    num_rows: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, launched = layer_of(shape_of(13, 3)), Grids(monkeypatch)
    compute(layer, rows_of(num_rows))
    # Given rows that all choose the same experts
    same, launched.grids = launched.grids, []
    compute(layer, rows_of(1).expand(num_rows, -1).contiguous())
    assert launched.grids == same
    assert len(same) == most
