"""LoRA on a GPU against plain torch and against the merged model, on any device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from inflight.common.model_source import resolve_model
from inflight.executor.adapters.peft_files import parse, read_files
from inflight.executor.adapters.weights import AdapterLimits, AdapterMatrix, AdapterWeights
from inflight.executor.checkpoint.decoder_weights import PROJECTIONS, DecoderShape
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.gpu.adapters import PARTS, AdapterSlots, Product
from inflight.executor.gpu.decoder import GpuDecoder
from inflight.executor.gpu.row_groups import RowGroups
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.scheduler.sequence import PlanRow, Sampling, Sequence, StepPlan, Stopping
from inflight.executor.step.batch import StepBatch, pack
from tests.support.checkpoints.adapter_files import SHAPE, save_adapter
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE

CPU = torch.device("cpu")
NUM_SLOTS, MAX_RANK = 4, 20
NUM_TOKENS = 4
# Sizes that fill no tile, inputs of several splits, and parts of different widths.
UNEVEN = replace(SHAPE, num_layers=1, hidden_size=1100, num_heads=5, num_kv_heads=2, head_dim=20, intermediate_size=150)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random_weights(shape: DecoderShape, rank: int, seed: int, skipped: frozenset[int] = frozenset()) -> AdapterWeights:
    """An adapter without the entries `skipped` of `PROJECTIONS`."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[tuple[AdapterMatrix | None, ...]] = []
    modules = [size for _, size in AdapterLimits(shape, rank).modules()]
    for first in range(0, len(modules), len(PROJECTIONS)):
        layers.append(
            tuple(
                None
                if at in skipped
                else AdapterMatrix(
                    torch.randn(rank, inputs, generator=generator) / inputs**0.5,
                    torch.randn(outputs, rank, generator=generator) / rank**0.5,
                    0.5 + at,
                )
                for at, (outputs, inputs) in enumerate(modules[first : first + len(PROJECTIONS)])
            )
        )
    return AdapterWeights(tuple(layers))


def batch_of(lengths: list[int], slots: list[int]) -> StepBatch:
    """A step of sequences with so many tokens and these slots, -1 for none."""
    rows = []
    for length, slot in zip(lengths, slots, strict=True):
        sequence = Sequence(
            "r", 1, list(range(length)), length, Sampling(0.0, 0, 1.0, 0), Stopping(1, 0, frozenset()), 0, None
        )
        sequence.block_table, sequence.adapter_slot = [1, 2, 3, 4], None if slot < 0 else slot
        rows.append(PlanRow(sequence, 0, length, True))
    return pack(StepPlan.of(rows), 16)


def changed(
    weights: dict[int, AdapterWeights], product: Product, slots: list[int], inputs: Tensor, outputs: Tensor
) -> Tensor:
    """The product of each row with its adapter, in float32 by plain torch."""
    expected = outputs.float().clone()
    sizes = [size for _, size in AdapterLimits(UNEVEN, MAX_RANK).modules()]
    for row, slot in enumerate(slots):
        first = 0
        for part in PARTS[product]:
            width = sizes[part][0]
            matrix = weights[slot].layers[0][part] if slot >= 0 else None
            if matrix is not None:
                a, b = matrix.a.to(inputs.dtype).float(), (matrix.b * matrix.scale).to(inputs.dtype).float()
                change = b @ (a @ inputs[row].float().cpu())
                expected[row, first : first + width] += change.to(expected.device)
            first += width
    return expected


def assert_rows_change_by_their_adapters(dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> None:
    """All products of three adapters of different ranks and of the base: right, and bit for bit those of each row
    alone."""
    weights = {
        0: random_weights(UNEVEN, 20, 0),
        1: random_weights(UNEVEN, 3, 1, frozenset({1, 5})),
        3: random_weights(UNEVEN, 8, 2),
    }
    adapters = AdapterSlots(UNEVEN, NUM_SLOTS, MAX_RANK, dtype, device)
    for slot, some in weights.items():
        adapters.load(slot, some)
    # More rows of an adapter than a tile has, a tile that is nearly empty, and rows without an adapter between them.
    lengths, of_sequence = [1, 1, 37, 1, 5, 2, 1], [3, 0, 1, -1, -1, 0, 3]
    slots = [slot for slot, length in zip(of_sequence, lengths, strict=True) for _ in range(length)]
    groups = RowGroups.of(batch_of(lengths, of_sequence), NUM_SLOTS, device)
    sizes = [size for _, size in AdapterLimits(UNEVEN, MAX_RANK).modules()]
    for product in Product:
        num_outputs, num_inputs = sum(sizes[part][0] for part in PARTS[product]), sizes[PARTS[product][0]][1]
        generator = torch.Generator().manual_seed(9)
        inputs = torch.randn(len(slots), num_inputs, generator=generator).to(device, dtype)
        before = torch.randn(len(slots), num_outputs, generator=generator).to(device, dtype)
        outputs = before.clone()
        adapters.add(0, product, inputs, outputs, groups)
        expected = changed(weights, product, slots, inputs, before)
        torch.testing.assert_close(outputs.float(), expected, rtol=TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])
        base = [row for row, slot in enumerate(slots) if slot < 0]
        assert torch.equal(outputs[base], before[base])
        for row in (0, 20, len(slots) - 1):
            alone = before[row : row + 1].clone()
            one = RowGroups.of(batch_of([1], [slots[row]]), NUM_SLOTS, device)
            adapters.add(0, product, inputs[row : row + 1], alone, one)
            assert torch.equal(alone[0], outputs[row])


# --- models


def adapter_files(folder: Path) -> list[Path]:
    """Three adapters for the tiny models, of different ranks."""
    return [save_adapter(folder / str(seed), seed=seed, rank=(4, 16, 3)[seed]) for seed in range(3)]


def load_adapters(decoder: Any, files: list[Path]) -> None:
    """Loads adapter i into slot i + 1, so that slot 0 stays empty."""
    decoder.reserve_adapters(NUM_SLOTS, 16)
    for number, folder in enumerate(files):
        decoder.load_adapter(number + 1, parse(read_files(folder), AdapterLimits(decoder.shape, 16)))


def load_adapted(base: Path, files: list[Path], device_name: str, num_blocks: int) -> tuple[PagedModel, GpuDecoder]:
    """A model with its GPU forward pass, three adapters and KV."""
    source = resolve_model(str(base))
    model = load_model(source, dtype_name="float32", backend_name="triton", device_name=device_name)
    assert isinstance(model.forward, GpuForward)
    load_adapters(model.forward.decoder, files)
    model.allocate_kv(num_blocks, 16)
    return model, model.forward.decoder


def adapted_requests(which: tuple[int, ...] = (0, 1, 2, 3, 4), num_tokens: int = NUM_TOKENS) -> list[Sequence]:
    """Greedy and random requests: the base, adapters 1 to 3, and adapter 1 again with a prompt of several chunks."""
    lengths, slots = (20, 3, 14, 1, 30), (None, 1, 2, 3, 1)
    made = []
    for number in which:
        ids = [(7 * number + 5 * i) % VOCABULARY_SIZE for i in range(lengths[number])]
        sampling = Sampling(0.8, 5, 0.9, 7) if number == 2 else Sampling(0.0, 0, 1.0, 0)
        stopping = Stopping(num_tokens, 0, frozenset())
        slot = slots[number]
        one = Sequence(f"request-{number}", 1, ids, len(ids), sampling, stopping, 3, b"salt")
        one.adapter_slot, one.adapter_hash = slot, b"" if slot is None else bytes([slot]) * 32
        made.append(one)
    return made


def merged_tokens(base: Path, adapter: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """The greedy tokens of PEFT's merged model."""
    from peft import PeftModel

    network: Any = AutoModelForCausalLM.from_pretrained(str(base), attn_implementation="eager")
    merged: Any = PeftModel.from_pretrained(network, str(adapter)).merge_and_unload().eval()
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(merged(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
