"""The peers of a benchmark: where they are installed, and how their drivers are started.

Starts nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Where `make bench-peers` installs.
FOLDER = Path(".peers")
INSTALLED_MARK = "installed"

# The bench package must be found by interpreters in which inflight is not installed.
SOURCES = Path(__file__).parents[3]

# Both speed vLLM up on a CPU: its documentation asks for them.
TCMALLOC = "libtcmalloc_minimal.so.4"
LIBRARY_FOLDERS = tuple(
    Path(folder) for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")
)
KV_CACHE_GIB = 2

VARIANTS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("compiled", "eager", "ngram", "serve"),
    "llama": ("file", "q4_0"),
    "transformers": ("continuous", "static"),
}
# The one that is driven through its own server.
SERVER = ("vllm", "serve")
# Peers that read the GGUF file itself instead of the folder that is made of it.
READS_GGUF = frozenset({"llama"})
# What a peer's bare name stands for.
DEFAULT_VARIANTS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("compiled",),
    "llama": ("file", "q4_0"),
    "transformers": ("continuous",),
}
# Those that run in inflight's own environment.
BUILT_IN = frozenset({"transformers"})


@dataclass(frozen=True, slots=True)
class PeerChoice:
    """One engine in one of its ways to run."""

    name: str
    variant: str

    @property
    def mode(self) -> str:
        """Its name in the report."""
        return (
            f"{self.name}-{self.variant}" if len(DEFAULT_VARIANTS[self.name]) > 1 or not self._is_default else self.name
        )

    @property
    def _is_default(self) -> bool:
        return self.variant in DEFAULT_VARIANTS[self.name]

    @property
    def environment_folder(self) -> Path:
        """Where it is installed."""
        return FOLDER / self.name

    @property
    def is_installed(self) -> bool:
        """Whether `make bench-peers` came to its end here."""
        return self.name in BUILT_IN or (self.environment_folder / INSTALLED_MARK).exists()

    @property
    def command(self) -> tuple[str, ...]:
        """Starts the driver with the interpreter of the peer's environment."""
        own = (self.environment_folder / "bin" / "python").absolute()
        python = sys.executable if self.name in BUILT_IN else own
        module = "vllm_serve" if (self.name, self.variant) == SERVER else self.name
        return (str(python), "-P", "-m", f"inflight.bench.peers.{module}_driver")


def parse_peer(text: str) -> tuple[PeerChoice, ...]:
    """`vllm` or `vllm:eager`; raises `ValueError` with what is known."""
    name, _, variant = text.partition(":")
    if name not in VARIANTS:
        raise ValueError(f"{name!r} is not one of {', '.join(VARIANTS)}")
    if not variant:
        return tuple(PeerChoice(name, default) for default in DEFAULT_VARIANTS[name])
    if variant not in VARIANTS[name]:
        raise ValueError(f"{variant!r} is not one of {name}'s {', '.join(VARIANTS[name])}")
    return (PeerChoice(name, variant),)


def peer_environment(peer: PeerChoice, base: Mapping[str, str], cores: Sequence[int]) -> dict[str, str]:
    """Returns the environment of a peer's driver, with the cores and its settings: that of this process, without the
    project's packages if the peer has an environment of its own."""
    common = {
        "OMP_NUM_THREADS": str(len(cores)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if peer.name in BUILT_IN:
        return {**base, **common}
    kept = {name: value for name, value in base.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "INFLIGHT_"))}
    own = {"PYTHONPATH": str(SOURCES), **(_vllm_environment(peer, cores) if peer.name == "vllm" else {})}
    return {**kept, **common, **own}


def _vllm_environment(peer: PeerChoice, cores: Sequence[int]) -> dict[str, str]:
    preloaded = preloads(peer.environment_folder)
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_NO_USAGE_STATS": "1",
        **({"LD_PRELOAD": ":".join(str(path) for path in preloaded)} if preloaded else {}),
    }


def preloads(environment_folder: Path, library_folders: Sequence[Path] = LIBRARY_FOLDERS) -> list[Path]:
    """Returns the allocator and the OpenMP library that vLLM wants loaded first, as far as this machine has them."""
    own = environment_folder / "lib"
    allocators = [path for folder in (*library_folders, own) if (path := folder / TCMALLOC).exists()]
    openmp = [path] if (path := own / "libiomp5.so").exists() else []
    return [path.absolute() for path in (*allocators[:1], *openmp)]


def missing_words(peer: PeerChoice) -> str:
    """What to do where a peer is not installed."""
    return f"{peer.mode}: not installed here; `make bench-peers` installs it"


def shortcomings(peer: PeerChoice) -> dict[str, str]:
    """What this machine lacks for the peer to be at its best, in words for the report."""
    if peer.name != "vllm" or any(path.name == TCMALLOC for path in preloads(peer.environment_folder)):
        return {}
    return {"allocator": "without tcmalloc, which this machine lacks (Debian: libtcmalloc-minimal4)"}
