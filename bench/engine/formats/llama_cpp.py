"""llama.cpp as the reference of GGUF files: what it quantizes, and its logits.

`make bench-peers PEERS=llama-cpp` installs it into an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from inflight.bench.peers.catalogue import FOLDER, INSTALLED_MARK, SOURCES

ENVIRONMENT = FOLDER / "llama-cpp"
Logits = np.ndarray[Any, np.dtype[np.float32]]


def is_installed() -> bool:
    """Returns whether `make bench-peers` has installed it here."""
    return (ENVIRONMENT / INSTALLED_MARK).exists()


def version() -> str:
    """Returns the package that is installed, in words."""
    return (ENVIRONMENT / INSTALLED_MARK).read_text(encoding="utf-8")


def quantize(path: Path, target: Path, kind: str) -> None:
    """Writes a GGUF file in one of llama.cpp's mixes of types, such as `Q4_K_M`."""
    _run("quantize", str(path), str(target), kind)


def logits(path: Path, prompts: Sequence[Sequence[int]], folder: Path) -> Logits:
    """Returns the logits `[positions, vocabulary]` of the prompts, prompt after prompt, without those of last tokens.
    They lie in a file in the folder."""
    given, target = folder / "prompts.json", folder / "logits.npy"
    given.write_text(json.dumps([list(prompt) for prompt in prompts]), encoding="utf-8")
    _run("logits", str(path), str(given), str(target))
    found: Logits = np.load(target, mmap_mode="c")
    return found


def _run(*arguments: str) -> None:
    python = (ENVIRONMENT / "bin" / "python").absolute()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    command = [str(python), "-P", "-m", "inflight.bench.engine.formats.llama_cpp_driver", *arguments]
    done = subprocess.run(
        command, env={**kept, "PYTHONPATH": str(SOURCES)}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"llama.cpp failed: {' '.join(arguments)}\n{done.stderr[-2000:]}")
