"""FP8 of the GPU path on a CPU, for figures of its quality: Triton's interpreter is too slow for a real model.

Keys, values and activations are rounded by torch, bit for bit as the kernels round them, and weights by the same code.
Products multiply the same e4m3 numbers, in float32: `torch._scaled_mm` is too slow on a CPU. Norms, rotation and
attention are those of transformers and of the CPU backend, in the model's dtype.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from inflight.common.model_source import ModelSource
from inflight.executor.attention.backend import AttentionBackend, KvShape, LayerKv, Scoring
from inflight.executor.checkpoint.fp8_weight import round_rows
from inflight.executor.checkpoint.quantized_linear import make_dense
from inflight.executor.formats.loading import load_network
from inflight.executor.forward.transformers import TransformersForward
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.step.batch import StepBatch


def rounded(numbers: Tensor) -> Tensor:
    """Returns finite numbers `[..., size]` as the kernels keep them in e4m3, in float32. The largest of each row is 448
    times its scale."""
    scales = numbers.float().abs().amax(-1, keepdim=True).clamp(min=2.0**-100) * (1 / 448)
    return (numbers.float() / scales).to(torch.float8_e4m3fn).float() * scales


def load_emulated(source: ModelSource, dtype_name: str, *, has_fp8_weights: bool, has_fp8_kv: bool) -> PagedModel:
    """Loads a model whose matrices of layers and their inputs, or whose keys and values, are rounded to FP8."""
    model = load_model(
        source, dtype_name=dtype_name, weight_dtype="dense", forward_name="transformers", device_name="cpu"
    )
    forward = model.forward
    assert isinstance(forward, TransformersForward)
    if has_fp8_weights:
        _replace_linears(forward, source)
    if has_fp8_kv:
        layout = replace(forward.layout, backend=RoundedKv(forward.layout.backend))
        return PagedModel(model.description, replace(forward, layout=layout))
    return model


def _replace_linears(forward: TransformersForward, source: ModelSource) -> None:
    network, layout = forward.network, forward.layout
    # The weights are loaded again because the model's own may be packed for the processor.
    dense, _ = load_network(source, layout.dtype, layout.device)
    make_dense(dense, layout.dtype)
    head = dense.get_output_embeddings()
    for name, module in [*dense.named_modules()]:
        if isinstance(module, nn.Linear) and module is not head:
            network.set_submodule(name, Fp8Linear(module))


class Fp8Linear(nn.Module):
    """A linear layer with weights and activations in FP8, each row with a scale."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = round_rows(linear.weight.detach())
        self._numbers, self._scales, self._bias = weight.numbers.float(), weight.scales, linear.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """Computes `inflight.executor.gpu.layers.linear`."""
        outputs = (functional.linear(rounded(inputs), self._numbers) * self._scales).to(inputs.dtype)
        return outputs if self._bias is None else outputs.add_(self._bias)


class RoundedKv:
    """A backend whose KV holds numbers of FP8 in the model's dtype, which adds a sixteenth of their error."""

    quantized_kv_dtypes: tuple[torch.dtype, ...] = ()

    def __init__(self, backend: AttentionBackend) -> None:
        self.name = backend.name
        self._backend = backend

    def allocate(
        self, shape: KvShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> LayerKv:
        """See `AttentionBackend`."""
        return self._backend.allocate(shape, num_blocks, block_size, dtype, device)

    def write(self, kv: LayerKv, keys: Tensor, values: Tensor, batch: StepBatch) -> None:
        """Rounds keys and values, then stores them."""
        self._backend.write(kv, rounded(keys).to(keys.dtype), rounded(values).to(values.dtype), batch)

    def attend(self, queries: Tensor, kv: LayerKv, batch: StepBatch, scoring: Scoring) -> Tensor:
        """See `AttentionBackend`."""
        return self._backend.attend(queries, kv, batch, scoring)
