"""Gated delta net of Qwen3.5 and Qwen3-Next: the state is a matrix for each head, which a token decays and corrects.

    S[t] = exp(g[t]) * S[t-1] + k[t] u[t]ᵀ,  u[t] = beta[t] * (v[t] - exp(g[t]) * S[t-1]ᵀ k[t]),  o[t] = S[t]ᵀ q[t]

With the boundary state S at a multiple of GRID and G[t] = the sum of g since then, the same is

    u[t] = beta[t] * (v[t] - exp(G[t]) * Sᵀ k[t] - sum over j < t of exp(G[t] - G[j]) * (k[t] · k[j]) u[j])
    o[t] = exp(G[t]) * Sᵀ q[t] + sum over j <= t of exp(G[t] - G[j]) * (q[t] · k[j]) u[j]

A slot has S, and k, u and g of the positions since. All positions are computed by these two formulas, in tiles of TILE
positions that begin at multiples of TILE, each with products of the same shapes: earlier positions of a tile come from
the slot, later ones are zero. So the numbers of a position are the same bits in a chunk of a prompt, in a decode, in a
draft and when they are computed again. S advances from one multiple of GRID to the next, by one product of a whole
chunk. Source of the delta rule by chunks: Yang et al., arXiv 2412.06464.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# The boundary of a slot is less than two chunks before the last position.
from inflight.common.model_files.recurrent import DELTA_GRID as GRID
from inflight.common.model_files.recurrent import DELTA_PLACES as NUM_PLACES
from inflight.common.model_files.recurrent import MixerShape
from inflight.executor.recurrent.mixer import MixerWeights, StateSizes, StateStep
from inflight.executor.recurrent.short_conv import ConvMemory, convolve

TILE = 16
EPSILON = 1e-6  # of the norms of queries and keys


@dataclass(frozen=True, slots=True, eq=False)
class DeltaMemory:
    """The slots and checkpoints of a layer, all float32 but the inputs of the convolution.

    `states[slots, heads, key_dim, value_dim]` are at position `boundaries[slots]`. Behind it, position p is at place
    `p % NUM_PLACES` of `keys[slots, NUM_PLACES, key_heads, key_dim]`, `updates[slots, NUM_PLACES, heads, value_dim]`
    and `gates[slots, NUM_PLACES, heads]`, the g of the position. `checkpoints` are states.
    """

    conv: ConvMemory
    states: Tensor
    boundaries: Tensor
    keys: Tensor
    updates: Tensor
    gates: Tensor
    checkpoints: Tensor

    @classmethod
    def allocate(cls, shape: MixerShape, sizes: StateSizes, dtype: torch.dtype, device: torch.device) -> DeltaMemory:
        """Allocates the memory of a layer, for activations of `dtype`."""
        slots, heads, key_dim, value_dim = sizes.num_slots, shape.num_heads, shape.key_dim, shape.value_dim

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.float32, device=device)

        return cls(
            ConvMemory.allocate(shape.channels, shape.conv_width, sizes, dtype, device),
            zeros(slots, heads, key_dim, value_dim),
            torch.zeros(slots, dtype=torch.int64, device=device),
            zeros(slots, NUM_PLACES, shape.num_key_heads, key_dim),
            zeros(slots, NUM_PLACES, heads, value_dim),
            zeros(slots, NUM_PLACES, heads),
            zeros(sizes.num_checkpoints, heads, key_dim, value_dim),
        )

    @property
    def num_bytes(self) -> int:
        own = (self.states, self.boundaries, self.keys, self.updates, self.gates, self.checkpoints)
        return self.conv.num_bytes + sum(tensor.nbytes for tensor in own)

    @property
    def slots(self) -> tuple[Tensor, ...]:
        return (*self.conv.slots, self.states, self.boundaries, self.keys, self.updates, self.gates)


@dataclass(slots=True, eq=False)
class Chunk:
    """The chunk that each of B sequences is in: its first position `starts[B]`, the state there `states[B, heads,
    key_dim, value_dim]`, and `keys[B, heads, GRID, key_dim]`, `updates[B, heads, GRID, value_dim]` and `gates[B,
    heads, GRID]` of its positions, zero where they are not known yet."""

    starts: Tensor
    states: Tensor
    keys: Tensor
    updates: Tensor
    gates: Tensor

    def decays(self, rows: Tensor) -> Tensor:
        """Returns G of each position, `[B, heads, GRID]`. The gates of later positions, zero or not, are multiplied by
        zero, so that each sum is the same bits whatever is known."""
        is_seen = torch.arange(GRID) <= torch.arange(GRID)[:, None]
        return (self.gates[rows][..., None, :] * is_seen).sum(-1)

    def advance(self, rows: Tensor) -> None:
        """Goes on to the next chunk, in these rows, whose chunk is complete."""
        if not len(rows):
            return
        decays = self.decays(rows)
        last = decays[..., -1:]
        weighted = self.keys[rows] * (last - decays).exp()[..., None]
        self.states[rows] = self.states[rows] * last[..., None].exp() + weighted.mT @ self.updates[rows]
        self.starts[rows] += GRID
        for tensor in (self.keys, self.updates, self.gates):
            tensor[rows] = 0


@dataclass(frozen=True, slots=True, eq=False)
class DeltaInputs:
    """What a step gives to the heads: `queries`, `keys` and `values` `[T, heads, dim]`, `gates` g and `betas` `[T,
    heads]`. All are float32. Without `betas` the values are the updates: nothing is corrected (Mamba 2)."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    gates: Tensor
    betas: Tensor | None


def delta_rule(inputs: DeltaInputs, memory: DeltaMemory, step: StateStep) -> Tensor:
    """Computes the outputs `[T, heads, value_dim]` of new positions; loads and saves checkpoints and keeps what the
    next positions need."""
    for load in step.loads:
        memory.states[load.slot] = memory.checkpoints[load.checkpoint]
        memory.boundaries[load.slot] = load.position
    chunk = _open(inputs, memory, step)
    # A row that verifies drafts has at most GRID + 1 positions, the first of which is known. So a state up to its end
    # less GRID depends on no draft.
    kept = torch.maximum(step.starts, step.ends - GRID) // GRID * GRID
    outputs = torch.empty_like(inputs.values)
    keys, updates = torch.empty_like(inputs.keys), torch.empty_like(inputs.values)
    _keep(chunk, memory, step, kept, torch.arange(len(kept)))
    first = step.starts // TILE * TILE
    for number in range(int(((step.ends - first + TILE - 1) // TILE).max())):
        tiles = first + number * TILE
        rows = torch.nonzero(tiles < step.ends)[:, 0]
        begun = rows[tiles[rows] == chunk.starts[rows] + GRID]
        chunk.advance(begun)
        _keep(chunk, memory, step, kept, begun)
        positions = tiles[rows, None] + torch.arange(TILE)
        is_new = (positions >= step.starts[rows, None]) & (positions < step.ends[rows, None])
        tokens = (step.firsts[rows, None] + positions - step.starts[rows, None])[is_new]
        found = _tile(inputs, chunk, rows, tiles[rows], is_new, tokens)
        outputs[tokens], keys[tokens], updates[tokens] = (of[is_new] for of in found)
    # A checkpoint may be at the end of the last chunk.
    complete = torch.nonzero(step.ends == chunk.starts + GRID)[:, 0]
    chunk.advance(complete)
    _save(chunk, memory, step, complete)
    stored = torch.nonzero(step.batch.positions >= kept[step.rows])[:, 0]
    slots, places = step.slots[step.rows[stored]], step.batch.positions[stored] % NUM_PLACES
    group = keys.shape[1] // memory.keys.shape[2]
    memory.keys[slots, places] = keys[stored, ::group]
    memory.updates[slots, places], memory.gates[slots, places] = updates[stored], inputs.gates[stored]
    return outputs


def _open(inputs: DeltaInputs, memory: DeltaMemory, step: StateStep) -> Chunk:
    """Returns the chunks of the first new positions, with what the slots have of them."""
    starts = step.starts // GRID * GRID
    boundaries = torch.where(step.starts > 0, memory.boundaries[step.slots], 0)
    places = (boundaries[:, None] + torch.arange(GRID)) % NUM_PLACES
    chunk = _read(memory, step, boundaries, places)
    is_new = step.starts == 0
    chunk.states[is_new] = 0
    # Drafts that were not accepted, or those of a sequence that had the slot before, are behind the first position.
    behind = torch.nonzero(boundaries < starts)[:, 0]
    chunk.advance(behind)
    after = _read(memory, step, chunk.starts, (chunk.starts[:, None] + torch.arange(GRID)) % NUM_PLACES)
    is_known = (chunk.starts[:, None] + torch.arange(GRID) < step.starts[:, None])[:, None]
    chunk.keys = torch.where(is_known[..., None], after.keys, 0.0)
    chunk.updates = torch.where(is_known[..., None], after.updates, 0.0)
    chunk.gates = torch.where(is_known, after.gates, 0.0)
    return chunk


def _read(memory: DeltaMemory, step: StateStep, starts: Tensor, places: Tensor) -> Chunk:
    slots = step.slots[:, None]
    group = memory.states.shape[1] // memory.keys.shape[2]
    return Chunk(
        starts.clone(),
        memory.states[step.slots],
        memory.keys[slots, places].repeat_interleave(group, 2).transpose(1, 2),
        memory.updates[slots, places].transpose(1, 2),
        memory.gates[slots, places].transpose(1, 2),
    )


def _keep(chunk: Chunk, memory: DeltaMemory, step: StateStep, kept: Tensor, rows: Tensor) -> None:
    """Stores the states of these rows whose chunk begins where the next step is to go on, and saves checkpoints."""
    stored = rows[chunk.starts[rows] == kept[rows]]
    memory.states[step.slots[stored]] = chunk.states[stored]
    memory.boundaries[step.slots[stored]] = chunk.starts[stored]
    _save(chunk, memory, step, rows)


def _save(chunk: Chunk, memory: DeltaMemory, step: StateStep, rows: Tensor) -> None:
    if not step.saves:
        return
    among = set(rows.tolist())
    for save in step.saves:
        if save.row in among and int(chunk.starts[save.row]) == save.position:
            memory.checkpoints[save.checkpoint] = chunk.states[save.row]


def _tile(
    inputs: DeltaInputs, chunk: Chunk, rows: Tensor, tiles: Tensor, is_new: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the tiles that begin at `tiles[B]` of the chunks `rows[B]`. Returns outputs, keys and updates `[B,
    TILE, heads, …]`; only those of new positions have a meaning."""

    def placed(values: Tensor) -> Tensor:
        """Returns `[B, heads, TILE, …]`."""
        tile = values.new_zeros((*is_new.shape, *values.shape[1:]))
        tile[is_new] = values[tokens]
        return tile.transpose(1, 2)

    queries, keys, values, gates = map(placed, (inputs.queries, inputs.keys, inputs.values, inputs.gates))
    places = (tiles - chunk.starts[rows])[:, None] + torch.arange(TILE)  # [B, TILE], in the chunk
    batch = rows[:, None]
    known_keys = chunk.keys[batch, :, places].transpose(1, 2)
    known_updates = chunk.updates[batch, :, places].transpose(1, 2)
    fresh = is_new[:, None]
    columns = torch.arange(GRID)
    is_seen = (columns <= places[..., None])[:, None]  # [B, 1, TILE, GRID]
    gates = torch.where(fresh, gates, chunk.gates[batch, :, places].transpose(1, 2))
    chunk.gates[batch, :, places] = gates.transpose(1, 2)
    all_decays = chunk.decays(rows)
    decays = all_decays.gather(-1, places[:, None].expand(*all_decays.shape[:2], TILE))
    keys = torch.where(fresh[..., None], keys, known_keys)
    chunk.keys[batch, :, places] = keys.transpose(1, 2)
    states, all_keys, all_updates = chunk.states[rows], chunk.keys[rows], chunk.updates[rows]
    distances = decays[..., None] - all_decays[..., None, :]  # [B, heads, TILE, GRID]
    weights = distances.masked_fill(~is_seen, float("-inf")).exp()
    grown = decays.exp()[..., None]
    if inputs.betas is None:
        updates = torch.where(fresh[..., None], values, known_updates)
    else:
        betas = placed(inputs.betas)
        is_earlier = (columns < places[..., None])[:, None]
        likeness = (keys @ all_keys.mT) * weights.masked_fill(~is_earlier, 0.0) * betas[..., None]
        in_tile = ((columns >= places[:, :1]) & (columns < places[:, :1] + TILE))[:, None, None]
        wanted = (values - grown * (keys @ states)) * betas[..., None]
        wanted = wanted - likeness.masked_fill(in_tile, 0.0) @ all_updates
        index = places[:, None, None].expand(*likeness.shape[:-1], TILE)
        system = torch.where(fresh[..., None], likeness.gather(-1, index), 0.0)
        wanted = torch.where(fresh[..., None], wanted, known_updates)
        updates = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    chunk.updates[batch, :, places] = updates.transpose(1, 2)
    attended = (queries @ all_keys.mT) * weights
    outputs = grown * (queries @ states) + attended @ chunk.updates[rows]
    return outputs.transpose(1, 2), keys.transpose(1, 2), updates.transpose(1, 2)


class GatedDeltaNet(nn.Module):
    """`Mixer` with the weights of a gated delta net of transformers."""

    grid_tokens = GRID

    def __init__(self, source: Any) -> None:
        super().__init__()
        projections: tuple[Any, ...] = _divided(source) if hasattr(source, "in_proj_qkvz") else _as_they_are(source)
        self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a = projections
        self.norm, self.out_proj = source.norm, source.out_proj
        self._key_heads, self._heads = source.num_k_heads, source.num_v_heads
        self._key_dim, self._value_dim = source.head_k_dim, source.head_v_dim
        self._taps = [tap.contiguous() for tap in source.conv1d.weight.detach()[:, 0].float().unbind(1)]
        self._rates: Tensor = -source.A_log.detach().float().exp()
        self._bias: Tensor = source.dt_bias.detach()

    def allocate(self, sizes: StateSizes, dtype: torch.dtype, device: torch.device) -> DeltaMemory:
        return DeltaMemory.allocate(self._shape, sizes, dtype, device)

    @property
    def _shape(self) -> MixerShape:
        sizes = (self._key_heads, self._heads, self._key_dim, self._value_dim)
        return MixerShape(len(self._taps), len(self._taps[0]), *sizes)

    def weights(self) -> MixerWeights:
        return MixerWeights(
            self._shape,
            (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a),
            self.out_proj,
            torch.stack(self._taps),
            (self._rates, self._bias.float(), self.norm.weight.detach().float()),
        )

    def mix(self, inputs: Tensor, memory: DeltaMemory, step: StateStep) -> Tensor:
        mixed = convolve(memory.conv.taps(self.in_proj_qkv(inputs), step), self._taps)
        mixed = functional.silu(mixed).to(inputs.dtype).float()
        key_size = self._key_heads * self._key_dim
        queries, keys, values = mixed.split((key_size, key_size, self._heads * self._value_dim), -1)
        group = self._heads // self._key_heads
        queries, keys = (
            _normed(part.unflatten(-1, (self._key_heads, self._key_dim))).repeat_interleave(group, 1)
            for part in (queries, keys)
        )
        gates = self._rates * functional.softplus(self.in_proj_a(inputs).float() + self._bias)
        betas = self.in_proj_b(inputs).sigmoid().float()
        values = values.unflatten(-1, (self._heads, self._value_dim))
        outputs = delta_rule(DeltaInputs(queries * self._key_dim**-0.5, keys, values, gates, betas), memory, step).to(
            inputs.dtype
        )
        gate = self.in_proj_z(inputs).unflatten(-1, (self._heads, self._value_dim))
        result: Tensor = self.out_proj(self.norm(outputs, gate).flatten(1))
        return result


def _as_they_are(source: Any) -> tuple[Any, ...]:
    return source.in_proj_qkv, source.in_proj_z, source.in_proj_b, source.in_proj_a


def _divided(source: Any) -> tuple[Any, ...]:
    """Returns the same of a module of Qwen3-Next, which has two projections. Their rows are those of each head of keys
    behind each other: its query, its key, and the values and z of its heads; b and a of these."""
    key_heads, key_dim = source.num_k_heads, source.head_k_dim
    group = source.num_v_heads // key_heads
    values = group * source.head_v_dim
    queries, keys, of_values, z = _rows(source.in_proj_qkvz, key_heads, (key_dim, key_dim, values, values))
    b, a = _rows(source.in_proj_ba, key_heads, (group, group))
    return (
        _linear(source.in_proj_qkvz, torch.cat((queries, keys, of_values))),
        _linear(source.in_proj_qkvz, z),
        _linear(source.in_proj_ba, b),
        _linear(source.in_proj_ba, a),
    )


def _rows(linear: Any, num_heads: int, sizes: tuple[int, ...]) -> Iterator[Tensor]:
    """Yields the rows of each part of a projection, of which every head has so many."""
    for rows in torch.arange(linear.out_features).view(num_heads, -1).split(sizes, 1):
        yield rows.flatten()


def _linear(source: Any, rows: Tensor) -> Any:
    """Returns a layer with some rows of another one, quantized if that is."""
    weight: Any = source.weight
    if not isinstance(weight, Tensor):
        return type(source)(weight.taken(rows), None)
    linear = nn.Linear(weight.shape[1], len(rows), bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach()[rows], requires_grad=False)
    return linear


def _normed(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + EPSILON)
