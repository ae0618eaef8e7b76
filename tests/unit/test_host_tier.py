"""KV that is swapped to host memory and back to other blocks: equal bit for bit, in every layout for a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from inflight.common.model_source import resolve_model
from inflight.common.settings import SettingError
from inflight.executor.attention.backend import AttentionBackend, KvShape, LayerKv
from inflight.executor.attention.cpu import CpuAttention
from inflight.executor.attention.gpu_host_tier import GpuHostTier, lock, runs, staging_bytes
from inflight.executor.attention.host_tier import CpuHostTier, open_host_tier
from inflight.executor.attention.reference import ReferenceAttention
from inflight.executor.attention.triton import TritonAttention
from inflight.executor.forward.native import NativeForward
from inflight.executor.loader import load_executor
from inflight.executor.main import identity
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from inflight.executor.native.pool import NativePool
from inflight.executor.scheduler.limits import SchedulerLimits
from inflight.executor.settings import ExecutorSettings
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.device.native_builds import INSTRUCTION_SETS, library_of
from tests.support.device.swapping import BLOCK_SIZE, LIMITS, NUM_BLOCKS, greedy_tokens
from tests.support.scheduler.evicted_prefixes import NUM_POOL_BLOCKS, conversations

# The first test of a build may wait for the compiler.
pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]

# A head of 24 numbers is rounded up in the layout of the C++ kernels, and layers need not be alike.
SHAPES = (KvShape(2, 16), KvShape(1, 24))
PATHS: dict[str, dict[str, str]] = {
    "reference-float32": {"dtype_name": "float32", "backend_name": "reference"},
    "reference-bfloat16": {"dtype_name": "bfloat16", "backend_name": "reference"},
    "cpu-attention-bfloat16": {"dtype_name": "bfloat16", "backend_name": "cpu", "forward_name": "transformers"},
    "native-float32": {"dtype_name": "float32", "backend_name": "cpu"},
    "native-bfloat16": {"dtype_name": "bfloat16", "backend_name": "cpu"},
    "native-int8": {"dtype_name": "bfloat16", "backend_name": "cpu", "weight_dtype": "int8"},
    "reference-int8-kv": {"dtype_name": "float32", "backend_name": "reference", "kv_cache_dtype": "int8"},
    "native-int8-kv": {"dtype_name": "bfloat16", "backend_name": "cpu", "kv_cache_dtype": "int8"},
}

PROCESS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "reference",
    "num_threads": 1,
    "max_tokens_in_paged_kv_cache": 160,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(LlamaConfig(**sizes()), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module", params=["reference", "cpu", "triton"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    if request.param == "cpu":
        library = library_of(INSTRUCTION_SETS[0])
        return CpuAttention(library, NativePool(library, 1))
    return ReferenceAttention() if request.param == "reference" else TritonAttention()


def random_kv(backend: AttentionBackend, dtype: torch.dtype, block_size: int) -> list[LayerKv]:
    """Any bits at all, those of not-a-number too."""
    kv = [backend.allocate(shape, NUM_BLOCKS + 1, block_size, dtype, torch.device("cpu")) for shape in SHAPES]
    generator = torch.Generator().manual_seed(0)
    for tensor in (tensor for layer in kv for tensor in (layer.keys, layer.values, *layer.scales)):
        words = tensor.view(-1).view(torch.int16)
        words.copy_(torch.randint(-(2**15), 2**15, words.shape, generator=generator, dtype=torch.int16))
    return kv


def bits(kv: list[LayerKv]) -> list[torch.Tensor]:
    return [rows.clone() for layer in kv for rows in layer.rows()]


@pytest.mark.parametrize("tier_class", [CpuHostTier, GpuHostTier])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_blocks_come_back_elsewhere_bit_for_bit(
    backend: AttentionBackend, dtype: torch.dtype, block_size: int, tier_class: Any
) -> None:
    if dtype.itemsize == 1 and dtype not in backend.quantized_kv_dtypes:
        return
    kv = random_kv(backend, dtype, block_size)
    tier, before = tier_class(kv, 5), bits(kv)

    # Given three blocks on the host, of which two are overwritten on the device
    tier.swap([(3, 4), (9, 0), (12, 1)], [])
    for rows in (rows for layer in kv for rows in layer.rows()):
        rows[[3, 12]] = -1
    # When they come back, one to a block that goes out in the same step, one to its old place
    tier.swap([(5, 3)], [(4, 5), (1, 12), (0, 2), (3, 3)])

    moved = {5: 3, 12: 12, 2: 9, 3: 5}
    expected = [rows[[moved.get(block, block) for block in range(NUM_BLOCKS + 1)]] for rows in before]
    assert all(torch.equal(now, then) for now, then in zip(bits(kv), expected, strict=True))


def test_more_blocks_than_are_on_their_way_at_once_all_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = random_kv(ReferenceAttention(), torch.float32, 16)
    bytes_per_block = sum(layer.num_bytes for layer in kv) // (NUM_BLOCKS + 1)
    monkeypatch.setattr("inflight.executor.attention.gpu_host_tier.STAGING_BYTES", 2 * bytes_per_block)
    assert staging_bytes(bytes_per_block, 7) == 2 * bytes_per_block
    tier, before = GpuHostTier(kv, 7), bits(kv)

    tier.swap([(block, (3 * block) % 7) for block in range(1, 8)], [])
    tier.swap([], [((3 * block) % 7, block % 7 + 1) for block in range(1, 8)])

    for now, then in zip(bits(kv), before, strict=True):
        assert torch.equal(now[[2, 3, 4, 5, 6, 7, 1]], then[1:8])


class FakeCuda:
    """In place of the CUDA runtime: which addresses are locked."""

    def __init__(self, failure: int) -> None:
        self.failure = failure
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 0
        self.locked[address] = num_bytes
        return self.failure

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def test_memory_is_locked_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(failure=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    memory = torch.zeros(5, dtype=torch.int64)
    lock(memory)
    assert cuda.locked == {memory.data_ptr(): 40}
    del memory
    assert not cuda.locked


def test_memory_that_cannot_be_locked_is_an_error_that_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeCuda(failure=2))
    with pytest.raises(SettingError, match=r"kv_cache_host_memory_bytes: CUDA cannot lock 40 bytes .*error 2"):
        lock(torch.zeros(5, dtype=torch.int64))


def test_neighbours_travel_as_one() -> None:
    assert list(runs([3, 4, 5, 9, 11, 12])) == [(3, 0, 3), (9, 3, 4), (11, 4, 6)]
    assert list(runs([])) == []


def test_pool_in_host_memory_gets_the_tier_without_a_gpu() -> None:
    assert isinstance(open_host_tier(random_kv(ReferenceAttention(), torch.float32, 16), 1), CpuHostTier)


def test_host_memory_that_the_system_does_not_give_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(SettingError, match=r"kv_cache_host_memory_bytes: cannot allocate \d+ bytes"):
        open_host_tier(random_kv(ReferenceAttention(), torch.float32, 16), 1 << 42)


def test_the_sequence_of_the_next_test_notices_when_nothing_is_copied(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder, PATHS["native-float32"])
    undisturbed = tokens_of(model, None)
    monkeypatch.setattr(CpuHostTier, "swap", lambda *_: None)
    assert tokens_of(model, 6) != undisturbed


@pytest.mark.parametrize("path", PATHS)
def test_sequence_goes_on_after_its_blocks_were_away(folder: Path, path: str) -> None:
    model = load(folder, PATHS[path])
    undisturbed = tokens_of(model, None)
    assert len(set(undisturbed)) > 2, "tokens that repeat would show little"
    for num_ahead in (0, 1):
        assert [tokens_of(model, count, num_ahead) for count in (1, 6)] == [undisturbed] * 2


@pytest.mark.parametrize("path", PATHS)
def test_prefix_that_was_evicted_comes_back_as_it_was(folder: Path, path: str) -> None:
    model = load(folder, PATHS[path])

    def make_runner(limits: SchedulerLimits) -> ModelRunner:
        model.allocate_kv(NUM_POOL_BLOCKS, BLOCK_SIZE)
        return ModelRunner(model, limits, BLOCK_SIZE)

    computed, _ = conversations(make_runner, num_host_blocks=0)
    copied, counts = conversations(make_runner, num_host_blocks=12)

    assert copied == computed
    assert counts.restored_blocks >= 6


def test_the_conversations_of_the_test_before_notice_when_nothing_is_copied(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder, PATHS["native-float32"])

    def make_runner(limits: SchedulerLimits) -> ModelRunner:
        model.allocate_kv(NUM_POOL_BLOCKS, BLOCK_SIZE)
        return ModelRunner(model, limits, BLOCK_SIZE)

    computed, _ = conversations(make_runner, num_host_blocks=0)
    monkeypatch.setattr(CpuHostTier, "swap", lambda *_: None)
    assert conversations(make_runner, num_host_blocks=12)[0] != computed


def test_setting_becomes_blocks_that_the_scheduler_and_the_routers_hear_of(folder: Path) -> None:
    bytes_per_block = load(folder, PATHS["reference-float32"]).forward.layout.bytes_per_block(16)
    settings = ExecutorSettings(**PROCESS, model=str(folder), kv_cache_host_memory_bytes=3 * bytes_per_block + 1)
    loaded = load_executor(settings)
    assert loaded.limits.num_host_blocks == 3
    assert identity(settings, loaded).description.host_blocks == 3


def test_host_memory_that_the_machine_has_not_is_refused_at_the_start(folder: Path) -> None:
    settings = ExecutorSettings(**PROCESS, model=str(folder), kv_cache_host_memory_bytes=2**60)
    with pytest.raises(SettingError, match="kv_cache_host_memory_bytes"):
        load_executor(settings)


def load(folder: Path, options: dict[str, Any]) -> PagedModel:
    model = load_model(resolve_model(str(folder)), device_name="cpu", **options)
    assert isinstance(model.forward, NativeForward) == (
        options["backend_name"] == "cpu" and "forward_name" not in options
    )
    return model


def tokens_of(model: PagedModel, swap_after: int | None, num_ahead: int = 0) -> list[int]:
    model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    return greedy_tokens(ModelRunner(model, LIMITS, BLOCK_SIZE), swap_after=swap_after, num_ahead=num_ahead)
