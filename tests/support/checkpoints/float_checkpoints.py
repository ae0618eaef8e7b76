"""Writers of tiny models in FP8 and FP4, by the formulas of the formats' descriptions.

The numbers of FP8 are rounded weights. Those of FP4 are random codes, with scales that keep them small.
"""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor

from tests.support.checkpoints.quantized_checkpoints import Encoded, Encoder, compressed_config

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0


def fp8_in_blocks(rows: int, columns: int, scale_name: str = "weight_scale_inv", **beside: Tensor) -> Encoder:
    """Returns an encoder with a scale for each block; the last ones may be smaller. `beside` are further tensors."""

    def encode(weight: Tensor) -> Encoded:
        num_rows, num_columns = weight.shape
        padding = 0, -num_columns % columns, 0, -num_rows % rows
        blocks = torch.nn.functional.pad(weight, padding).unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scale = blocks.abs().amax((1, 3)) / LARGEST
        spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:num_rows, :num_columns]
        numbers = (weight / spread).to(E4M3)
        return {"weight": numbers, scale_name: scale} | copied(beside), numbers.float() * spread

    return encode


def fp8_of_matrices(scale_name: str, **beside: Tensor) -> Encoder:
    """Returns an encoder with a scale for each matrix."""

    def encode(weight: Tensor) -> Encoded:
        scale = weight.abs().max() / LARGEST
        numbers = (weight / scale).to(E4M3)
        return {"weight": numbers, scale_name: scale} | copied(beside), numbers.float() * scale

    return encode


def fp4_of_modelopt(weight: Tensor) -> Encoded:
    """Makes a layer of NVFP4 as ModelOpt stores it."""
    codes, scale = random_codes(weight), random_scales(weight, 16)
    factor = torch.tensor(2e-4)
    tensors = {"weight": codes, "weight_scale": scale, "weight_scale_2": factor, "input_scale": torch.tensor(0.1)}
    return tensors, fp4_numbers(codes) * (scale.float() * factor).repeat_interleave(16, 1)


def fp4_of_compressed_tensors(form: str) -> Encoder:
    """Returns an encoder of NVFP4 or MXFP4; the dense matrix is the package's."""
    is_nvfp4 = form.startswith("nvfp4")
    weights = compressed_fp4(form)
    scheme = QuantizationScheme.model_validate({"targets": ["Linear"], "weights": weights})
    compressor = BaseCompressor.get_value_from_registry(form)

    def encode(weight: Tensor) -> Encoded:
        tensors = {"weight_packed": random_codes(weight)}
        if is_nvfp4:
            tensors |= {"weight_scale": random_scales(weight, 16), "weight_global_scale": torch.tensor([4096.0])}
        else:
            exponents = torch.randint(114, 120, (weight.shape[0], weight.shape[1] // 32), generator=seeded(weight))
            tensors |= {"weight_scale": exponents.to(torch.uint8)}
        return tensors, compressor.decompress(dict(tensors), scheme)["weight"].float()

    return encode


def compressed_fp4(form: str) -> dict[str, Any]:
    """Returns how compressed-tensors describes the weights of a format."""
    fields: dict[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True}
    of_form = {"nvfp4": ("tensor_group", 16), "mxfp4": ("group", 32)}[form[:5]]
    return fields | dict(zip(("strategy", "group_size"), of_form, strict=True))


def with_activations(form: str, activations: dict[str, Any], **weights: Any) -> dict[str, Any]:
    """Returns a configuration of compressed-tensors whose activations are quantized, too."""
    config = compressed_config(form, **weights)
    config["config_groups"]["group_0"]["input_activations"] = activations
    return config


def fp4_numbers(codes: Tensor) -> Tensor:
    """Returns the numbers of pairs of codes: a sign, an exponent of two bits and one bit of mantissa."""
    halves = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int()
    exponent, mantissa = (halves >> 1) & 3, halves & 1
    magnitude = torch.where(exponent == 0, mantissa * 0.5, (1 + mantissa * 0.5) * torch.exp2(exponent - 1.0))
    return torch.where(halves & 8 != 0, -magnitude, magnitude)


def random_codes(weight: Tensor) -> Tensor:
    shape = weight.shape[0], weight.shape[1] // 2
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=seeded(weight))


def random_scales(weight: Tensor, group_size: int) -> Tensor:
    shape = weight.shape[0], weight.shape[1] // group_size
    return (torch.rand(shape, generator=seeded(weight)) * 100 + 1).to(E4M3)


def seeded(weight: Tensor) -> torch.Generator:
    """Returns a generator whose numbers follow from a weight."""
    return torch.Generator().manual_seed(int(weight[0, 0].abs() * 1e6))


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies, since a file has no tensor twice."""
    return {name: tensor.clone() for name, tensor in tensors.items()}
