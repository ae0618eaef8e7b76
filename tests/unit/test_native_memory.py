"""Memory of the C++ code: reserved before its threads run, where a failure is one of the call; not from their
stacks."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inflight.executor.attention.backend import KvShape
from inflight.executor.attention.cpu import CpuAttention
from inflight.executor.native.build import BuildFailure, prebuild
from inflight.executor.native.library import (
    COMMON_FLAGS,
    FOLDER,
    INSTRUCTION_SETS,
    NAME,
    SOURCES,
    InstructionSet,
    load_native,
    usable_instruction_sets,
)
from inflight.executor.native.memory import HUGE_PAGE_BYTES
from inflight.executor.native.pool import NativePool
from tests.support.device.native_builds import library_of

REPOSITORY = Path(__file__).parents[2]
# The first test of a build may have to wait for the compiler.
pytestmark = pytest.mark.timeout(600)
# The smallest stack that a thread has by default on Linux (musl) is 128 KB; a quarter of that for the kernels.
MAX_FRAME_BYTES = 32 << 10

SETUP = """
import resource, sys, threading
import numpy as np, torch
from inflight.executor.attention.backend import KvShape, Scoring
from inflight.executor.attention.cpu import CpuAttention
from inflight.executor.native.library import load_native
from inflight.executor.native.pool import NativePool
from inflight.executor.cpu.sampler import NativeSampler
from inflight.executor.step.sampling import SampleRow
from inflight.executor.step.sampling_columns import SamplingBatch
from inflight.executor.scheduler.sequence import Sampling
from tests.support.device.paged_cases import Spec, make_case

torch.set_num_threads(1)
library = load_native()
pool = NativePool(library, 2)
sampler = NativeSampler(library, pool)

def sampling_of(num_rows):
    return SamplingBatch.of([SampleRow(Sampling(1.0, 0, 0.9, i), 0, frozenset()) for i in range(num_rows)])

def attend(dtype):
    case = make_case((Spec(70, 70), Spec(1, 41), Spec(3, 93)), 16)
    shape = KvShape(num_kv_heads=2, head_dim=64)
    backend = CpuAttention(library, pool)
    kv = backend.allocate(shape, case.num_blocks + 1, 16, dtype, torch.device("cpu"))
    queries = torch.randn(case.batch.num_tokens, 4, 64).to(dtype)
    return lambda: backend.attend(queries, kv, case.batch, Scoring(0.2))
"""

ON_A_SMALL_STACK = """
works = [attend(torch.float32), attend(torch.bfloat16)]
logits, sampling = torch.randn(40, 3000), sampling_of(40)
works.append(lambda: sampler.sample(logits, sampling))
done = []
def run():
    for work in works:
        work()
        done.append(work)
threading.stack_size(128 << 10)
thread = threading.Thread(target=run)
thread.start()
thread.join()
print(len(done))
"""

WITHOUT_MEMORY = """
logits, sampling = torch.zeros(2, 40_000_000), sampling_of(2)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
try:
    sampler.sample(logits, sampling)
except MemoryError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(sampler.sample(torch.eye(2, 1000) * 99, sampling_of(2)).tolist())
"""


def run_script(script: str) -> str:
    """What a process of its own prints."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", SETUP + script],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout


def test_kernels_run_on_a_thread_with_a_small_stack() -> None:
    assert run_script(ON_A_SMALL_STACK) == "3\n"


def test_a_step_without_memory_fails_and_the_next_one_runs() -> None:
    assert run_script(WITHOUT_MEMORY) == "not enough memory to sample 2 rows\n[0, 1]\n"


def test_layers_reach_their_next_huge_page_at_different_blocks() -> None:
    # Given the KV of a model with 30 layers, whose blocks are taken in the same order everywhere
    num_blocks, library = 1024, load_native()
    assert not isinstance(library, BuildFailure), library
    backend, shape = CpuAttention(library, NativePool(library, 1)), KvShape(num_kv_heads=3, head_dim=64)
    layers = [backend.allocate(shape, num_blocks, 16, torch.bfloat16, torch.device("cpu")) for _ in range(30)]
    tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values)]

    # When steps take a few new blocks each, then few tensors reach a page that was not written before
    block_bytes = tensors[0].nbytes // num_blocks
    blocks_per_page = HUGE_PAGE_BYTES // block_bytes
    first_blocks = [-tensor.data_ptr() % HUGE_PAGE_BYTES // block_bytes for tensor in tensors]
    most = max(sum(first <= block < first + 16 for block in first_blocks) for first in range(blocks_per_page))
    assert most <= 2 * len(tensors) * 16 / blocks_per_page


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="these builds are for x86-64")
@pytest.mark.parametrize("instructions", INSTRUCTION_SETS, ids=lambda instructions: instructions.name)
def test_no_function_of_any_build_needs_a_large_stack(instructions: InstructionSet, tmp_path: Path) -> None:
    """Also of builds that this processor cannot run."""
    if instructions in usable_instruction_sets():
        # The build that other tests run, from the disk cache.
        built = Path(library_of(instructions.name).calls._name)
    else:
        flags = (*instructions.compiler_flags, *COMMON_FLAGS)
        built = prebuild(tmp_path, NAME, SOURCES, sorted(FOLDER.glob("*.h")), flags)
    assert 0 < largest_frame_bytes(built) <= MAX_FRAME_BYTES


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the disassembly of x86-64 is read")
@pytest.mark.parametrize("flags", [(), ("-fstack-clash-protection",)], ids=["plain", "probed"])
def test_large_frame_is_found_in_a_build(flags: tuple[str, ...], tmp_path: Path) -> None:
    source = tmp_path / "frame.cpp"
    source.write_text(
        'void fill(char*);\nextern "C" void large() { char numbers[40000]; fill(numbers); }\n'
        "void fill(char* numbers) { static_cast<volatile char*>(numbers)[39999] = 1; }\n"
    )
    built = prebuild(tmp_path, "frame", (source,), (), (*INSTRUCTION_SETS[-1].compiler_flags, "-fno-inline", *flags))
    assert MAX_FRAME_BYTES < largest_frame_bytes(built) < 2 * MAX_FRAME_BYTES


def largest_frame_bytes(library: Path) -> int:
    """The largest number that a function subtracts from the stack pointer."""
    disassembler = shutil.which("objdump")
    if disassembler is None:
        pytest.skip("there is no objdump here")
    command = [disassembler, "-d", "--no-show-raw-insn", str(library)]
    code = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    assert not re.search(r"\bsub +%r\w+,%rsp", code), "a frame's size is only known at run time"
    # With probes of each page the lowest address is computed first.
    sizes = re.findall(r"\b(?:sub +\$0x([0-9a-f]+),%rsp|lea +-0x([0-9a-f]+)\(%rsp\),%r)", code)
    numbers = (int(subtracted or reached, 16) for subtracted, reached in sizes)
    # A negative number, in 64 bits, gives memory back.
    return max((number for number in numbers if number < 1 << 63), default=0)
