"""A driver of llama.cpp by its C interface: greedy, sequences join and leave at every step as in its server; with the
GGUF file as it is, or quantized again to Q4_0, which llama.cpp repacks and computes fastest. Runs in llama.cpp's own
environment."""

from __future__ import annotations

import ctypes
import sys
import time
from collections import deque
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import llama_cpp
import numpy

from inflight.bench.peers.driver import CannotRun, Request, Setup, TokenBatch, serve

# Tokens of a step at most, and of one pass through the model: the defaults of llama.cpp's server.
BATCH_TOKENS = 2048
PASS_TOKENS = 512
# Contexts are padded to a multiple of this.
CONTEXT_STEP_TOKENS = 256


@dataclass(slots=True)
class _Sequence:
    """A request in a seat. Its next token is to be computed once all of its prompt is."""

    request: Request
    seat: int
    num_computed: int = 0
    num_output: int = 0
    last_token: int = 0


class LlamaEngine:
    """A model and a context with a sequence for each seat."""

    def __init__(self, setup: Setup) -> None:
        llama_cpp.llama_backend_init()
        path = _model_file(setup)
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise CannotRun(f"llama.cpp does not load {path.name}")
        self._context = llama_cpp.llama_init_from_model(self._model, _context_settings(setup))
        if not self._context:
            raise CannotRun("llama.cpp has no memory for the contexts")
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._vocabulary_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._waiting: deque[Request] = deque()
        self._running: list[_Sequence] = []
        self._free_seats = list(range(setup.seats))
        self._num_steps = 0
        version = metadata.version("llama-cpp-python")
        self._words = {"engine": f"llama.cpp of llama-cpp-python {version}", "weights": setup.variant}

    def describe(self) -> dict[str, str]:
        return self._words

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def advance(self, wait_s: float | None) -> list[TokenBatch]:
        """Computes one step: a token of each sequence that decodes, then as much of prompts as fits."""
        while self._waiting and self._free_seats:
            self._running.append(_Sequence(self._waiting.popleft(), self._free_seats.pop()))
        self._batch.n_tokens = 0
        rows = [(self._pack(sequence), sequence) for sequence in self._by_progress()]
        failure = llama_cpp.llama_decode(self._context, self._batch)
        if failure:
            raise RuntimeError(f"llama_decode returned {failure}")
        self._num_steps += 1
        sampled = [(row, sequence) for row, sequence in rows if row is not None]
        for row, sequence in sampled:
            self._sample(row, sequence)
        self._release_finished()
        tokens = [(sequence.request.id, 1) for _, sequence in sampled]
        return [TokenBatch(time.monotonic(), tokens)] if tokens else []

    def figures(self) -> dict[str, float]:
        num_steps, self._num_steps = self._num_steps, 0
        return {"num_steps": num_steps}

    def _by_progress(self) -> list[_Sequence]:
        """Returns the sequences that decode before those with prompts to compute, each in order of arrival."""
        return sorted(self._running, key=lambda sequence: sequence.num_output == 0)

    def _pack(self, sequence: _Sequence) -> int | None:
        """Adds a sequence's next tokens to the batch. Returns the row that yields its next token, or None."""
        prompt = sequence.request.prompt_ids
        ids = prompt[sequence.num_computed :] or [sequence.last_token]
        ids = ids[: BATCH_TOKENS - self._batch.n_tokens]
        for token in ids:
            row = self._batch.n_tokens
            self._batch.token[row] = token
            self._batch.pos[row] = sequence.num_computed
            self._batch.n_seq_id[row] = 1
            self._batch.seq_id[row][0] = sequence.seat
            self._batch.logits[row] = sequence.num_computed >= len(prompt) - 1
            self._batch.n_tokens += 1
            sequence.num_computed += 1
        return self._batch.n_tokens - 1 if ids and sequence.num_computed >= len(prompt) else None

    def _sample(self, row: int, sequence: _Sequence) -> None:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        sequence.last_token = int(numpy.ctypeslib.as_array(logits, (self._vocabulary_size,)).argmax())
        sequence.num_output += 1

    def _release_finished(self) -> None:
        memory = llama_cpp.llama_get_memory(self._context)
        for sequence in [one for one in self._running if one.num_output >= one.request.output_tokens]:
            llama_cpp.llama_memory_seq_rm(memory, sequence.seat, -1, -1)
            self._running.remove(sequence)
            self._free_seats.append(sequence.seat)


def _model_file(setup: Setup) -> Path:
    """Returns the GGUF file to load. It is quantized once for the variant `q4_0`."""
    source = Path(setup.model)
    if source.suffix != ".gguf":
        raise CannotRun("llama.cpp needs a GGUF file")
    if setup.variant != "q4_0":
        return source
    made = Path(setup.cache_folder) / "llama.cpp" / f"{source.stem}-q4_0.gguf"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
        settings.allow_requantize = True
        part = made.with_suffix(".part")
        if llama_cpp.llama_model_quantize(str(source).encode(), str(part).encode(), ctypes.byref(settings)):
            raise CannotRun(f"llama.cpp does not quantize {source.name}")
        part.rename(made)
    return made


def _context_settings(setup: Setup) -> llama_cpp.llama_context_params:
    """Every seat has room for the longest request."""
    settings = llama_cpp.llama_context_default_params()
    seat_tokens = -(-setup.max_request_tokens // CONTEXT_STEP_TOKENS) * CONTEXT_STEP_TOKENS
    settings.n_ctx = setup.seats * seat_tokens
    settings.n_seq_max = setup.seats
    settings.n_batch = BATCH_TOKENS
    settings.n_ubatch = PASS_TOKENS
    settings.n_threads = settings.n_threads_batch = setup.num_threads
    return settings


if __name__ == "__main__":
    sys.exit(serve(LlamaEngine))
