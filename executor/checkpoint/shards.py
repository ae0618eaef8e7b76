"""Division of a decoder's weights between the ranks of a tensor-parallel executor.

Every matrix is divided by columns, which are the rows of a weight `[out, in]`: queries, keys and values by heads, the
others by ranges, those of each expert like those of a feed-forward layer. With more ranks than KV heads, several ranks
have the same KV head and different query heads. Recurrent layers are divided by heads, or channels of short
convolutions; several ranks may have the same keys of Mamba 2. Of an adapter each rank has all of A, and of B the rows
that it has of the weight. A rank computes its columns from whole rows of activations, so no sum is split, and every
number has the same bits as with one rank.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from inflight.common.kv_size import kv_heads_of_rank, numbers_of_ranks
from inflight.common.model_files.layer_sizes import PART_COLUMNS, PART_INNER_COLUMNS, columns_of_rank
from inflight.common.model_files.recurrent import MixerShape, Part
from inflight.executor.checkpoint.decoder_weights import DecoderShape, DecoderWeights, LayerWeights
from inflight.executor.checkpoint.quantized_weight import FloatWeight, Matrix, QuantizedWeight
from inflight.executor.recurrent.mixer import MixerWeights


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the weights that a rank has."""

    rank: int = 0
    num_ranks: int = 1

    def of(self, rank: int) -> Shard:
        """Returns the shard of another rank."""
        return replace(self, rank=rank)

    def columns(self, count: int, multiple: int = PART_COLUMNS) -> slice:
        """Returns the rank's range of columns. All ranges are equal, except that the last ones may be smaller or
        empty."""
        if self.num_ranks == 1:
            return slice(0, count)
        part = columns_of_rank(count, self.num_ranks, multiple)
        first = min(count, self.rank * part)
        return slice(first, min(count, first + part))

    def shape(self, shape: DecoderShape) -> DecoderShape:
        """Returns the shape with the heads and mixers of this rank only."""
        return replace(
            shape,
            num_heads=shape.num_heads // self.num_ranks,
            num_kv_heads=self.num_kv_heads(shape.num_kv_heads),
            mixer=None if shape.mixer is None else self.mixer(shape.mixer),
        )

    def num_kv_heads(self, of_all: int) -> int:
        """Returns the KV heads that a rank has, of a model with so many."""
        return kv_heads_of_rank(of_all, self.num_ranks)

    def embedding(self, weights: DecoderWeights) -> Tensor:
        """Returns the columns of the embedding `[vocabulary, columns]`."""
        return weights.embedding[:, self.columns(weights.shape.hidden_size)]

    def head(self, weights: DecoderWeights) -> Matrix:
        """Returns the rank's tokens of the output layer."""
        return _rows(weights.head, self.columns(weights.shape.vocabulary_size))

    def qkv(self, shape: DecoderShape, parts: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
        """Returns queries, keys and values of the rank's heads. `parts` are the three weights, or one that is
        fused."""
        if self.num_ranks == 1:
            return parts
        queries = shape.num_heads * (2 if shape.has_output_gate else 1)
        counts = [count * shape.head_dim for count in (queries, shape.num_kv_heads, shape.num_kv_heads)]
        heads = self._heads(shape)
        return tuple(_rows(part, rows) for part, rows in zip(_divided(parts, counts), heads, strict=True))

    def _heads(self, shape: DecoderShape) -> tuple[slice, slice, slice]:
        """Returns the rank's rows of queries, each with its gate, of keys and values."""
        num_heads, num_kv_heads = shape.num_heads // self.num_ranks, self.num_kv_heads(shape.num_kv_heads)
        num_heads *= 2 if shape.has_output_gate else 1
        first_kv_head = self.rank * shape.num_kv_heads // self.num_ranks
        queries, kv = (
            slice(first * shape.head_dim, (first + count) * shape.head_dim)
            for first, count in ((self.rank * num_heads, num_heads), (first_kv_head, num_kv_heads))
        )
        return queries, kv, kv

    def qkv_bias(self, shape: DecoderShape, bias: Tensor) -> Tensor:
        """Returns the biases of the rank's heads."""
        return torch.cat([part for part in self.qkv(shape, (bias,)) if isinstance(part, Tensor)])

    def mixer(self, mixer: MixerShape) -> MixerShape:
        """Returns the heads, or channels, of a recurrent layer that this rank has."""
        return mixer if self.num_ranks == 1 else mixer.of_rank(self.num_ranks)

    def mixer_inputs(self, mixer: MixerShape, matrices: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
        """Returns the rank's rows of the projections in front of a mixer."""
        if self.num_ranks == 1:
            return matrices
        ends = list(accumulate(matrix.shape[0] for matrix in matrices))
        of_rank: list[Matrix] = []
        for rows in self._of_parts(mixer.input_parts):
            index = bisect_right(ends, rows.start)
            first = ends[index] - matrices[index].shape[0]
            of_rank.append(_rows(matrices[index], slice(rows.start - first, rows.stop - first)))
        return tuple(of_rank)

    def mixer_bias(self, mixer: MixerShape, bias: Tensor) -> Tensor:
        """Returns the biases of those rows."""
        return bias if self.num_ranks == 1 else bias[_places(self._of_parts(mixer.input_parts))]

    def mixer_vectors(self, mixer: MixerWeights) -> tuple[Tensor, ...]:
        """Returns the taps and the vectors of the rank's channels and heads. Norms are whole."""
        shape = mixer.shape
        if self.num_ranks == 1:
            return mixer.taps, *mixer.vectors
        channels = _places(self._of_parts(shape.conv_parts))
        taps = mixer.taps[:, channels]
        if not shape.num_heads:
            (bias,) = mixer.vectors
            return taps, bias[channels]
        (heads,) = self._of_parts(((shape.num_heads, 1),))
        if shape.corrects:
            rates, bias, norm = mixer.vectors
            return taps, rates[heads], bias[heads], norm
        conv_bias, rates, bias, norm, skips, limits = mixer.vectors
        return taps, conv_bias[channels], rates[heads], bias[heads], norm, skips[heads], limits

    def _of_parts(self, parts: Sequence[Part]) -> tuple[slice, ...]:
        """Returns the rank's range of each part of a mixer. Those of fewer heads than ranks are on several ranks."""
        ranges, first = [], 0
        for count, size in parts:
            start = first + self.rank * count // self.num_ranks * size
            ranges.append(slice(start, start + max(1, count // self.num_ranks) * size))
            first += count * size
        return tuple(ranges)

    def gate_up(self, parts: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
        """Returns the rank's columns of the gate and of the up projection: two weights, or one that is fused."""
        if self.num_ranks == 1:
            return parts
        size = sum(part.shape[0] for part in parts) // 2
        columns = self.columns(size, PART_INNER_COLUMNS)
        return tuple(_rows(part, columns) for part in _divided(parts, [size] * 2))

    def experts_gate_up(self, weight: Tensor) -> Tensor:
        """Returns the rank's columns of the gate and of the up projection of every expert, `[experts, 2 * columns,
        hidden]`."""
        columns = self.columns(weight.shape[1] // 2, PART_INNER_COLUMNS)
        return weight.reshape(weight.shape[0], 2, -1, weight.shape[2])[:, :, columns].flatten(1, 2)

    def experts_down(self, shape: DecoderShape, weight: Tensor) -> Tensor:
        """Returns the rank's columns of what every expert yields, `[experts, columns, inner]`."""
        return weight[:, self.columns(shape.hidden_size)]

    def experts_gate_up_bias(self, bias: Tensor) -> Tensor:
        """Returns the biases of those columns, `[experts, 2 * columns]`."""
        return self.experts_gate_up(bias[..., None]).squeeze(-1)

    def sinks(self, shape: DecoderShape, sinks: Tensor) -> Tensor:
        """Returns the scores of the rank's heads."""
        num_heads = shape.num_heads // self.num_ranks
        return sinks[self.rank * num_heads : (self.rank + 1) * num_heads]

    def hidden(self, shape: DecoderShape, weight: Matrix) -> Matrix:
        """Returns the rank's columns of a matrix that is added to the residual stream."""
        return _rows(weight, self.columns(shape.hidden_size))

    def outputs(self, shape: DecoderShape) -> tuple[slice, ...]:
        """Returns the rank's rows of the seven weights of a layer, from queries to the down projection."""
        queries, keys, values = self._heads(shape)
        hidden = self.columns(shape.hidden_size)
        inner = self.columns(shape.intermediate_size, PART_INNER_COLUMNS)
        return queries, keys, values, hidden, inner, inner, hidden


def _rows(matrix: Matrix, rows: slice) -> Matrix:
    return matrix[rows] if isinstance(matrix, Tensor) else matrix.rows(rows.start, rows.stop)


def _places(ranges: Sequence[slice]) -> Tensor:
    return torch.cat([torch.arange(one.start, one.stop) for one in ranges])


def _divided(parts: tuple[Matrix, ...], counts: list[int]) -> tuple[Matrix, ...]:
    """Returns the matrices of so many rows each, of which a fused one consists."""
    if len(parts) > 1:
        return parts
    ends = list(accumulate(counts))
    return tuple(_rows(parts[0], slice(end - count, end)) for end, count in zip(ends, counts, strict=True))


WHOLE = Shard()


def indivisible_reason(shape: DecoderShape, num_ranks: int) -> str | None:
    """Returns why a model cannot be divided between so many ranks; None if it can."""
    sizes = numbers_of_ranks(shape.num_heads, shape.num_kv_heads)
    if num_ranks in sizes:
        return None if shape.mixer is None else shape.mixer.indivisible_reason(num_ranks)
    return (
        f"{shape.num_heads} heads and {shape.num_kv_heads} KV heads cannot be divided by {num_ranks}; "
        f"sizes that work: {', '.join(map(str, sizes))}"
    )


def divide(weights: DecoderWeights, shard: Shard, device: torch.device) -> DecoderWeights:
    """Returns copies of a rank's part of dense weights, on a device. Their `shape` is that of the whole model."""

    def place(part: Matrix) -> Tensor:
        assert isinstance(part, Tensor)
        return part.to(device, copy=True)

    def vector(part: Tensor | None) -> Tensor | None:
        return None if part is None else place(part)

    def part_of(part: Tensor | None, cut: Callable[[Tensor], Tensor]) -> Tensor | None:
        return None if part is None else place(cut(part))

    def joined_gate_up(parts: tuple[Matrix, ...]) -> tuple[Tensor]:
        return (torch.cat([place(part) for part in shard.gate_up(parts)]),)

    def feed_forward_part(layer: LayerWeights) -> tuple[tuple[Tensor], Tensor]:
        if layer.router is None:
            return joined_gate_up(layer.gate_up_parts), place(shard.hidden(shape, layer.down))
        (gate_up,), down = layer.gate_up_parts, layer.down
        assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
        return (place(shard.experts_gate_up(gate_up)),), place(shard.experts_down(shape, down))

    def layer_part(layer: LayerWeights) -> LayerWeights:
        bias = None if layer.qkv_bias is None else place(shard.qkv_bias(shape, layer.qkv_bias))
        qkv = torch.cat([place(part) for part in shard.qkv(shape, layer.qkv_matrices)])
        output_bias = None if layer.output_bias is None else place(shard.hidden(shape, layer.output_bias))
        gate_up, down = feed_forward_part(layer)
        shared = layer.shared_down
        return LayerWeights(
            input_norm=vector(layer.input_norm),
            qkv_parts=(_linear(qkv, bias),),
            query_norm=vector(layer.query_norm),
            key_norm=vector(layer.key_norm),
            output=place(shard.hidden(shape, layer.output)),
            output_bias=output_bias,
            attention_output_norm=vector(layer.attention_output_norm),
            post_attention_norm=vector(layer.post_attention_norm),
            gate_up_parts=gate_up,
            down=down,
            feed_forward_output_norm=vector(layer.feed_forward_output_norm),
            router=vector(layer.router),
            router_correction=vector(layer.router_correction),
            shared_gate_up_parts=() if shared is None else joined_gate_up(layer.shared_gate_up_parts),
            shared_down=None if shared is None else place(shard.hidden(shape, shared)),
            shared_gate=vector(layer.shared_gate),
            router_bias=vector(layer.router_bias),
            gate_up_bias=part_of(layer.gate_up_bias, shard.experts_gate_up_bias),
            down_bias=part_of(layer.down_bias, lambda bias: bias[:, shard.columns(shape.hidden_size)]),
            sinks=part_of(layer.sinks, lambda sinks: shard.sinks(shape, sinks)),
        )

    shape = weights.shape
    return DecoderWeights(
        shape=shape,
        embedding=place(shard.embedding(weights)),
        layers=tuple(map(layer_part, weights.layers)),
        final_norm=place(weights.final_norm),
        head=place(shard.head(weights)),
    )


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def digest_of(weights: DecoderWeights) -> str:
    """Returns a checksum of all numbers, to tell models with equal configurations apart. It reads them once, and is no
    protection against forgery."""
    digest = hashlib.sha256(repr(weights.shape).encode())
    for tensor in _tensors(weights):
        words = tensor.detach().contiguous().flatten().view(torch.int16)
        positions = words.view(-1, 2) if words.numel() % 2 == 0 else words[:, None]
        digest.update(repr((tuple(tensor.shape), positions.sum(0, dtype=torch.int64).tolist())).encode())
    return digest.hexdigest()[:16]


def _tensors(weights: DecoderWeights) -> Iterator[Tensor]:
    yield weights.embedding
    yield from _numbers(weights.head)
    yield weights.final_norm
    for layer in weights.layers:
        for field in fields(layer):
            value: Any = getattr(layer, field.name)
            if isinstance(value, MixerWeights):
                value = value.taps, *value.vectors  # its projections are those of the layer
            parts: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
            for part in parts:
                if part is not None:
                    # A linear layer, or a weight itself.
                    yield from _numbers(getattr(part, "weight", part))


def _numbers(matrix: Matrix) -> Iterator[Tensor]:
    if isinstance(matrix, QuantizedWeight):
        yield from (matrix.codes.to(torch.int16), matrix.scale, matrix.offset)
    elif isinstance(matrix, FloatWeight):
        yield from (matrix.codes.to(torch.int16), matrix.scale.float())
        if matrix.factor is not None:
            yield matrix.factor
    else:
        yield matrix
