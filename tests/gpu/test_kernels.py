"""The Triton kernels on a GPU, against the reference backend and the torch sampler on the same device."""

from __future__ import annotations

import pytest
import torch

from inflight.executor.attention.backend import KvShape, Scoring
from inflight.executor.gpu.layers import gated, residual_norm
from inflight.executor.gpu.sampling import DrawRows, draw
from inflight.executor.scheduler.sequence import Sampling
from inflight.executor.step.sampling import SampleRow, sample
from tests.kernels.comparison import assert_attends_as_the_reference, assert_rows_are_independent
from tests.kernels.test_triton_processing import assert_every_combination_as_the_reference
from tests.support.device.paged_cases import Spec

pytestmark = pytest.mark.gpu

MIXED = (*(Spec(1, 37 * i + 1) for i in range(9)), Spec(130, 130), Spec(5, 700), Spec(300, 900))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "group", "block_size"),
    [(64, 1, 16), (64, 3, 16), (80, 7, 32), (96, 16, 16), (128, 4, 16), (128, 8, 32), (256, 2, 16)],
)
def test_attention_equals_the_reference(
    gpu: torch.device, dtype: torch.dtype, head_dim: int, group: int, block_size: int
) -> None:
    assert_attends_as_the_reference(
        MIXED,
        KvShape(2, head_dim),
        group,
        block_size=block_size,
        dtype=dtype,
        device=gpu,
    )


@pytest.mark.parametrize(
    "scoring",
    [
        Scoring(0.1, 33),
        Scoring(0.1, 512, 2.0),
        Scoring(0.3, None, 30.0),
        Scoring(0.1, 128, has_sinks=True),
        Scoring(0.1, has_sinks=True),
    ],
    ids=str,
)
def test_window_cap_and_sinks_equal_the_reference(gpu: torch.device, scoring: Scoring) -> None:
    assert_attends_as_the_reference(MIXED, KvShape(2, 128), 4, scoring=scoring, device=gpu)


@pytest.mark.parametrize("num_tokens", [2, 4, 8])
def test_verification_equals_the_reference(gpu: torch.device, num_tokens: int) -> None:
    specs = tuple(Spec(num_tokens, 100 * i + num_tokens) for i in range(1, 8))
    assert_attends_as_the_reference(specs, KvShape(8, 128), 4, dtype=torch.bfloat16, device=gpu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("alone", "together"), [(1, 1), (2, 40)], ids=["decodes", "chunks"])
def test_result_of_a_row_does_not_depend_on_the_batch(
    gpu: torch.device, dtype: torch.dtype, alone: int, together: int
) -> None:
    for window in (None, 100):
        scoring = Scoring(0.2, window)
        assert_rows_are_independent((290, 45, 3000), alone, together, scoring, dtype=dtype, device=gpu)


def test_norm_and_gate_equal_torch(gpu: torch.device) -> None:
    hidden, delta, weight = (torch.randn(77, 4096, device=gpu) for _ in range(3))
    expected = hidden + delta
    outputs = residual_norm(hidden, delta, weight[0], 1e-5)
    torch.testing.assert_close(hidden, expected)
    torch.testing.assert_close(outputs, torch.nn.functional.rms_norm(expected, (4096,), weight[0], 1e-5))
    gate_up = torch.randn(33, 2 * 14336, device=gpu)
    gate, up = gate_up.chunk(2, 1)
    torch.testing.assert_close(gated(gate_up), torch.nn.functional.silu(gate) * up)


def test_draws_are_those_of_the_torch_sampler(gpu: torch.device) -> None:
    # Given a vocabulary of many chunks; only a tie in the last bits of the noise could turn out otherwise
    num_rows, vocabulary_size = 64, 128_256
    logits = torch.randn(num_rows, vocabulary_size, device=gpu) * 3
    rows = [
        SampleRow(
            Sampling(0.1 * (i % 16), 50 * (i % 3), 1.0 - 0.1 * (i % 2), 2**40 * i + i, 0.01 * (i % 4)),
            1000 * i,
            frozenset(),
        )
        for i in range(num_rows)
    ]
    words = torch.zeros(num_rows, dtype=torch.int32, device=gpu)
    seeds = torch.tensor([row.sampling.seed for row in rows])
    token_ids = words.clone()
    draw(
        logits,
        DrawRows(
            temperatures=torch.tensor([row.sampling.temperature for row in rows], device=gpu),
            top_ks=torch.tensor([row.sampling.top_k for row in rows], dtype=torch.int32, device=gpu),
            top_ps=torch.tensor([row.sampling.top_p for row in rows], device=gpu),
            min_p_logs=torch.tensor([row.sampling.min_p for row in rows], device=gpu).log(),
            seeds_low=(seeds & 0x7FFF_FFFF).to(gpu, torch.int32),
            seeds_high=(seeds >> 32).to(gpu, torch.int32),
            output_indices=torch.tensor([row.output_index for row in rows], dtype=torch.int32, device=gpu),
            banned_ids=words,
            banned_starts=torch.zeros(num_rows + 1, dtype=torch.int32, device=gpu),
        ),
        token_ids,
    )
    assert token_ids.tolist() == sample(logits, rows).tolist()


@pytest.mark.parametrize("vocabulary_size", [45, 128_256])
def test_changed_logits_are_bit_for_bit_the_reference(gpu: torch.device, vocabulary_size: int) -> None:
    assert_every_combination_as_the_reference(vocabulary_size, gpu)
