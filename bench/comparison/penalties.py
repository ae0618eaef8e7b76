"""Comparison of penalties with vLLM: the same greedy tokens, in float32, for every combination of the three.

    make bench-peers PEERS=vllm
    python -m inflight.bench.comparison.penalties

Prints how many outputs are equal. Where two differ, the penalised logits of the two tokens are nearly equal, or one of
the engines is wrong: the position and the tokens are printed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc.aio

from inflight.bench.peers.catalogue import FOLDER, KV_CACHE_GIB
from inflight.common.model_source import resolve_model
from inflight.executor.checkpoint.gguf import import_gguf
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from inflight.v1 import inference_pb2, inference_pb2_grpc, types_pb2

PROMPTS = (
    "The city bus stops at every corner. The city bus stops at",
    "One two three one two three one two",
    "Write a poem about the sea:",
    "def add(a, b):\n    return a + b\n\ndef",
)
FREQUENCY = (0.0, 0.4, -0.3)
PRESENCE = (0.0, 0.6)
REPETITION = (1.0, 1.2)
MAX_TOKENS = 48

Case = dict[str, Any]


async def tokenized(stub: Any) -> list[list[int]]:
    return [list((await stub.Tokenize(inference_pb2.TokenizeRequest(text=text))).token_ids) for text in PROMPTS]


def cases_of(prompts: list[list[int]]) -> list[Case]:
    names = ("prompt_ids", "frequency_penalty", "presence_penalty", "repetition_penalty")
    return [
        dict(zip(names, values, strict=True), max_tokens=MAX_TOKENS)
        for values in itertools.product(prompts, FREQUENCY, PRESENCE, REPETITION)
    ]


async def ours(stub: Any, case: Case) -> list[int]:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=case["prompt_ids"]),
        sampling=types_pb2.SamplingParams(
            temperature=0.0,
            frequency_penalty=case["frequency_penalty"],
            presence_penalty=case["presence_penalty"],
            repetition_penalty=case["repetition_penalty"],
        ),
        stopping=types_pb2.StoppingParams(max_tokens=case["max_tokens"], ignore_eos=True),
        output=inference_pb2.OutputOptions(token_ids=True, text=False),
    )
    ids: list[int] = []
    async for response in stub.Generate(request):
        ids.extend(response.event.delta.token_ids)
    return ids


def of_vllm(model: str, cases: list[Case], folder: Path) -> list[list[int]]:
    """Runs vLLM in its own environment and process."""
    target = folder / "vllm.json"
    subprocess.run(
        [str(FOLDER / "vllm" / "bin" / "python"), "-m", "inflight.bench.peers.vllm_penalties", str(target)],
        input=json.dumps({"model": model, "cases": cases}),
        text=True,
        check=True,
        stdout=sys.stderr,
        env={**os.environ, "PYTHONPATH": ".", "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB)},
    )
    answers: list[list[int]] = json.loads(target.read_text())
    return answers


async def compare(folder: Path) -> int:
    """Returns the number of outputs that differ."""
    options = StackOptions(executor_args=("--dtype", "float32"), run_dir=folder / "run")
    async with LocalStack(options) as stack, grpc.aio.insecure_channel(stack.address) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        cases = cases_of(await tokenized(stub))
        answers = await asyncio.gather(*(ours(stub, case) for case in cases))
    theirs = of_vllm(str(import_gguf(resolve_model(""))), cases, folder)
    num_different = 0
    for case, one, other in zip(cases, answers, theirs, strict=True):
        if one == other:
            continue
        num_different += 1
        position = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        penalties = {name: value for name, value in case.items() if name.endswith("penalty")}
        print(f"differs at token {position}: inflight {one[position]}, vLLM {other[position]}; {penalties}")
    print(f"{len(cases) - num_different} of {len(cases)} outputs of {MAX_TOKENS} tokens are equal")
    return num_different


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        return int(asyncio.run(compare(Path(folder))) > 0)


if __name__ == "__main__":
    sys.exit(main())
