"""Layers of experts on a GPU, against torch on the same device."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_gpu_experts import assert_is_that_of_torch, assert_same_bits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_experts", "num_rows"), [(24, 3), (6, 9), (3, 25), (2, 300)])
def test_layer_is_that_of_torch(num_experts: int, num_rows: int, dtype: torch.dtype, gpu: torch.device) -> None:
    assert_is_that_of_torch(num_experts, num_rows, dtype, gpu)


@pytest.mark.parametrize("num_together", [4, 60])
def test_row_has_the_same_bits_alone_and_in_company(num_together: int, gpu: torch.device) -> None:
    assert_same_bits(num_together, torch.bfloat16, gpu)
