"""A driver of OpenVINO GenAI's continuous batching, step by step. Runs in its own environment.

The model is exported once into the cache folder. `max_num_seqs` does not bound how many sequences run when prompts are
split (`dynamic_split_fuse`), so the seats are counted here.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from inflight.bench.peers.driver import CannotRun, Request, Setup, TokenBatch, serve

CACHE_GIB = 2
WEIGHT_FORMATS = {"bf16": "fp16", "int8": "int8"}


class OpenVinoEngine:
    """`ContinuousBatchingPipeline` with its prefix cache on, computing in bf16 where the processor has it."""

    def __init__(self, setup: Setup) -> None:
        folder = exported(setup)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.max_num_seqs = setup.seats
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": setup.num_threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
        self._seats = setup.seats
        self._waiting: deque[Request] = deque()
        self._running: dict[int, tuple[Any, int]] = {}
        self._next_id = 0
        self._num_steps = 0
        self._words = {
            "engine": f"OpenVINO GenAI {openvino_genai.__version__}",
            "weights": setup.variant,
            "KV cache": "its default type",
        }

    def describe(self) -> dict[str, str]:
        return self._words

    def add(self, request: Request) -> None:
        """Takes a request in at the end of the line."""
        self._waiting.append(request)

    def advance(self, wait_s: float | None) -> list[TokenBatch]:
        """Starts the requests that fit, then computes one step."""
        while self._waiting and len(self._running) < self._seats:
            self._seat(self._waiting.popleft())
        self._pipeline.step()
        self._num_steps += 1
        at = time.monotonic()
        tokens = [(request_id, number) for request_id in list(self._running) if (number := self._read(request_id))]
        return [TokenBatch(at, tokens)] if tokens else []

    def figures(self) -> dict[str, float]:
        num_steps, self._num_steps = self._num_steps, 0
        return {"num_steps": num_steps}

    def _seat(self, request: Request) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request.output_tokens
        config.min_new_tokens = request.output_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = openvino.Tensor(np.array([request.prompt_ids], dtype=np.int64))
        handle = self._pipeline.add_request(self._next_id, ids, config)
        self._next_id += 1
        self._running[request.id] = (handle, request.output_tokens)

    def _read(self, request_id: int) -> int:
        """How many tokens of a request have come."""
        handle, owed = self._running[request_id]
        number = 0
        while handle.can_read():
            number += sum(len(output.generated_ids) for output in handle.read().values())
        if number >= owed:
            del self._running[request_id]
        else:
            self._running[request_id] = (handle, owed - number)
        return number


def exported(setup: Setup) -> Path:
    """Returns the model in OpenVINO's format, made by `optimum-intel` if it is not there."""
    source = Path(setup.model)
    folder = Path(setup.cache_folder) / "openvino" / f"{source.parent.name}-{source.name}-{setup.variant}"
    if (folder / "openvino_model.xml").exists() and (folder / "openvino_tokenizer.xml").exists():
        return folder
    tool = Path(sys.executable).with_name("optimum-cli")
    options = ["--task", "text-generation-with-past", "--weight-format", WEIGHT_FORMATS[setup.variant]]
    command = [str(tool), "export", "openvino", "--model", str(source), *options, str(folder)]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        raise CannotRun(f"the model cannot be exported: optimum-cli ended with {done.returncode}")
    return folder


if __name__ == "__main__":
    sys.exit(serve(OpenVinoEngine))
