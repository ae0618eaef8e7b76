"""`python -m tests.deploy.bills CYCLONEDX_PY FOLDER`: a bill of materials of each built image, from what is installed.

Prints the sizes of its layers, too, for docs/images.md.

`cyclonedx-py environment` asks the Python of an environment for its path. That of an image starts only in the image, so
a script answers for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.deploy.images import Image, build, layer_sizes, make_base, only_user, reason_to_skip, servers_to_build


def write_bill(program: Path, target: str, file: Path) -> None:
    """Writes the CycloneDX file of an image."""
    image = Image.mount(target)
    try:
        with tempfile.TemporaryDirectory() as folder:
            python = Path(folder) / "python"
            path = json.dumps([str(image.site_packages)])
            python.write_text(f"#!/bin/sh\ncat <<'END'\n{path}\nEND\n")
            python.chmod(0o755)
            command = [str(program), "environment", "--output-reproducible", "--spec-version", "1.6", str(python)]
            made = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    finally:
        image.remove()
    file.write_text(json.dumps(json.loads(made), indent=1, sort_keys=True) + "\n")


def main(program: Path, folder: Path) -> None:
    """Builds the images and writes their files."""
    if reason := reason_to_skip():
        sys.exit(f"error: {reason}")
    folder.mkdir(parents=True, exist_ok=True)
    with only_user():
        make_base()
        for target in servers_to_build():
            build(target)
            write_bill(program, target, folder / f"{target}.cdx.json")
            layers = layer_sizes(target)
            print(target, "MB compressed:", round(sum(layers) / 1e6), [round(size / 1e6, 1) for size in layers])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
