"""Images that buildah builds from `deploy/Dockerfile` without a registry, and processes in their root file systems.

What stands for what a build with access to registries has:

    python:3.12-slim-bookworm   Debian by debootstrap with its own Python; like it without documentation and caches
    package indexes             a folder of wheels, which this machine's pip downloads by the locks, hashes checked
    a container runtime         namespaces for mounts, processes, IPC and the host's name; a root that is mounted
                                read-only; tmpfs on /tmp; the image's user, without other groups and new privileges

The network is this machine's. Everything is kept in the cache folder, under `images`; it is safe to delete.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from filelock import FileLock
from packaging.markers import default_environment
from packaging.requirements import Requirement

from inflight.common.disk_cache import build_once, cache_folder
from inflight.common.guard import guarded

REPOSITORY = Path(__file__).parents[2]
LOCKS = REPOSITORY / "deploy" / "locks"
# "0" switches these tests off; "cuda" adds the image for GPUs, whose packages are gigabytes.
SWITCH = "TEST_IMAGES"
DEBIAN = "bookworm"
PYTHON = "3.11"
BASE = f"localhost/inflight-test/python:{PYTHON}-{DEBIAN}"
NEEDED = ("buildah", "unshare", "chroot")
# Of these an image needs nothing; python:slim has none, either.
LEFT_OUT = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/info",
    "var/cache/apt",
    "var/lib/apt/lists",
)
PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# Folders of wheels by the locks that fill them. Two builds of torch cannot share one: pip would take the wrong one
# for the version that is wanted, and refuse its hash.
WHEELS = {"wheels": ("build", "front", "executor-cpu", "torch-cpu", "model"), "wheels-cuda": ("build", "executor-cuda")}
PACKAGES = ("inflight", "common", "router", "executor", "gateway", "bench")
# Bounds for a busy machine, not expectations.
DOWNLOAD_S = 1200
BUILD_S = 3600
# Between health checks. Each one starts Python, on the cores that the containers need for their own start.
HEALTH_RETRY_S = 0.5
OFFLINE = re.compile(
    r"Temporary failure resolving|Could not (resolve|connect)|Unable to (connect|fetch)|Network is unreachable"
)

# `$1` is the root, `$2` the user and group, `$3` the host's name, then mounts as MODE:SOURCE:TARGET until `--`, then
# the command.
START = """
set -eu
root=$1 user=$2 host=$3; shift 3
echo "$host" >/proc/sys/kernel/hostname
mount --make-rprivate /
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs "$root/tmp"
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
while [ "$1" != -- ]; do
    mode=${1%%:*} rest=${1#*:}
    mount --bind "${rest%%:*}" "$root${rest#*:}"
    mount -o "remount,bind,$mode" "$root${rest#*:}"
    shift
done
shift
exec chroot "$root" setpriv --reuid "${user%:*}" --regid "${user#*:}" --clear-groups --no-new-privs --pdeathsig KILL \\
    /usr/bin/env -i "$@"
"""


def reason_to_skip() -> str | None:
    """Says why images cannot be built here, or are not to be."""
    if os.environ.get(SWITCH) == "0":
        return f"switched off by {SWITCH}=0"
    if sys.platform != "linux" or os.geteuid() != 0:
        return "images are built by root on Linux"
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)} (Debian: the package buildah)"
    if not _base_archive().exists() and shutil.which("debootstrap") is None:
        return "not installed: debootstrap (Debian: the package debootstrap)"
    return None


def servers_to_build() -> tuple[str, ...]:
    """The targets of servers that are built here."""
    servers = ("router", "gateway", "executor-cpu")
    return (*servers, "executor-cuda") if os.environ.get(SWITCH) == "cuda" else servers


def image_name(target: str) -> str:
    """The name of a target's image in the store of these tests."""
    return f"localhost/inflight-test/{target}:built"


def buildah(*arguments: str, timeout_s: float = 120.0) -> str:
    """Runs buildah on the store of these tests, and returns what it prints."""
    folder = cache_folder() / "images"
    store = ("--root", str(folder / "store"), "--runroot", str(folder / "run"))
    environment = {**os.environ, "TMPDIR": str(_scratch_folder())}
    ended = subprocess.run(
        ["buildah", *store, *arguments],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if ended.returncode:
        raise BuildahFailure(f"buildah {arguments[0]} failed:\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}")
    return ended.stdout


def _scratch_folder() -> Path:
    """Where buildah keeps layers that it makes; in /var/tmp, its default, those of a killed process would stay."""
    folder = cache_folder() / "images" / "tmp"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class BuildahFailure(Exception):
    """What buildah said."""


def build(target: str) -> None:
    """Builds a target of the Dockerfile, unless the image of an earlier build is of the same sources.

    Layers of earlier builds are used again where their sources are the same; to find that out, buildah reads them all.
    """
    built = cache_folder() / "images" / f"{target}.built"
    digest = _digest_of_sources(target)
    if built.exists() and built.read_text() == digest and image_name(target) in _image_names():
        return
    wheels = _wheels("wheels-cuda" if target == "executor-cuda" else "wheels")
    arguments = {"PYTHON_IMAGE": BASE, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheelhouse", "TORCH_INDEX": "none"}
    options = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    options += ["--isolation=chroot", "--network=host", "--format=docker", "--layers", "--pull-never"]
    options += [f"--volume={wheels}:/wheelhouse:ro", "--file=deploy/Dockerfile", f"--target={target}"]
    options += ["--ignorefile=deploy/Dockerfile.dockerignore", f"--tag={image_name(target)}"]
    try:
        buildah("bud", *options, ".", timeout_s=BUILD_S)
    except BuildahFailure as failure:
        if OFFLINE.search(str(failure)):
            pytest.skip(f"Debian's packages cannot be reached: {failure}")
        raise
    built.write_text(digest)


def _digest_of_sources(target: str) -> str:
    """A digest of what the image is made of. The model depends on little of the code, and takes long."""
    packages = ("executor/checkpoint", "common/model_source.py") if target == "models" else PACKAGES
    paths = [REPOSITORY / name for name in ("deploy/Dockerfile", "deploy/Dockerfile.dockerignore", "pyproject.toml")]
    for name in ("deploy/locks", *packages):
        found = REPOSITORY / name
        files = found.rglob("*") if found.is_dir() else (found,)
        paths += sorted(path for path in files if path.is_file() and "__pycache__" not in path.parts)
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(REPOSITORY)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def layer_sizes(target: str, level: int = 6) -> list[int]:
    """Bytes of the layers of a target's image as a registry stores them, compressed by gzip, the base first."""
    with tempfile.TemporaryDirectory(dir=_scratch_folder()) as folder:
        options = ("--quiet", "--compression-format=gzip", f"--compression-level={level}")
        buildah("push", *options, image_name(target), f"oci:{folder}:{target}", timeout_s=BUILD_S)
        blobs = Path(folder) / "blobs"
        index = json.loads((Path(folder) / "index.json").read_text())
        manifest = json.loads((blobs / index["manifests"][0]["digest"].replace(":", "/")).read_text())
        return [layer["size"] for layer in manifest["layers"]]


def _image_names() -> list[str]:
    return buildah("images", "--format={{.Name}}:{{.Tag}}").splitlines()


@contextlib.contextmanager
def only_user() -> Iterator[None]:
    """Keeps the store to this process, and removes what a killed process left there."""
    folder = cache_folder() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        shutil.rmtree(_scratch_folder())
        buildah("rm", "--all")
        yield


def make_base() -> None:
    """Makes the base image, unless there is one."""
    archive = build_once(_base_archive(), _debootstrap)
    if BASE not in _image_names():
        container = buildah("from", "scratch").strip()
        buildah("add", container, str(archive), "/")
        buildah("config", "--env=PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", container)
        buildah("commit", "--rm", container, BASE)


def _base_archive() -> Path:
    return cache_folder() / "images" / f"base-{DEBIAN}.tar"


def _debootstrap(archive: Path) -> None:
    root = archive.with_suffix(".root")
    packages = "--include=python3,python3-venv,ca-certificates"
    ended = subprocess.run(
        ["debootstrap", "--variant=minbase", packages, DEBIAN, str(root)],
        capture_output=True,
        text=True,
        timeout=DOWNLOAD_S,
    )
    if ended.returncode:
        pytest.skip(f"debootstrap: {(ended.stderr or ended.stdout).strip()[-300:]}")
    for folder in LEFT_OUT:
        shutil.rmtree(root / folder, ignore_errors=True)
    for path in (root / "var/log").rglob("*"):
        if path.is_file():  # the folders stay: apt fails without its own
            path.unlink()
    (root / "usr/bin/python").symlink_to("python3")
    with tarfile.open(archive, "w") as tar:
        tar.add(root, ".")


def _wheels(folder_name: str) -> Path:
    """A folder of wheels, downloaded where its locks have changed."""
    names = WHEELS[folder_name]
    text = "".join((LOCKS / f"{name}.txt").read_text() for name in names)
    folder = cache_folder() / "images"
    target = folder / folder_name
    said = folder / f"{folder_name}.lock"
    if said.exists() and said.read_text() == text:
        return target
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in names:
        _download(name, target)
    said.write_text(text)
    return target


def _download(name: str, target: Path) -> None:
    requirements = target / f"{name}.txt"
    requirements.write_text("\n".join(_for_base((LOCKS / f"{name}.txt").read_text())))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={PYTHON}", "--require-hashes", f"--dest={target}", f"--requirement={requirements}"]
    for more in ([], [f"--extra-index-url={PYTORCH_INDEX}"]) if name == "torch-cpu" else ([],):
        ended = subprocess.run([*command, *more], capture_output=True, text=True, timeout=DOWNLOAD_S)
        if ended.returncode == 0:
            return
    pytest.skip(f"the packages of {name} cannot be downloaded: {ended.stderr.strip()[-300:]}")


def _for_base(lock: str) -> list[str]:
    """The lines of a lock that hold for some Python 3.11, without their conditions."""
    environments = [
        {
            **cast(dict[str, str], default_environment()),
            "python_full_version": f"{PYTHON}.{patch}",
            "python_version": PYTHON,
        }
        for patch in (0, 99)
    ]
    lines = []
    for line in re.sub(r"\\\n", " ", lock).splitlines():
        if not line or line.startswith("#"):
            continue
        wanted, *hashes = line.split(" --hash")
        marker = Requirement(wanted).marker
        if marker is None or any(marker.evaluate(environment) for environment in environments):
            lines.append(" --hash".join((wanted.partition(";")[0].strip(), *hashes)))
    return lines


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder of this machine in a container; `mode` is `ro` or `rw`."""

    source: Path
    target: str
    mode: str = "ro"


@dataclass(frozen=True, slots=True)
class Image:
    """A built image whose file system is mounted at `root`, and what it says of itself."""

    target: str
    container: str
    root: Path
    settings: Mapping[str, Any]

    @classmethod
    def mount(cls, target: str) -> Image:
        """Makes a container of a target's image."""
        container = buildah("from", "--pull-never", image_name(target)).strip()
        root = Path(buildah("mount", container).strip())
        inspected = json.loads(buildah("inspect", "--type=image", image_name(target)))
        return cls(target, container, root, inspected["Docker"]["config"])

    def remove(self) -> None:
        """Removes the container."""
        buildah("umount", self.container)
        buildah("rm", self.container)

    @property
    def site_packages(self) -> Path:
        """The folder with the Python packages."""
        (folder,) = self.root.glob("opt/inflight/lib/python*/site-packages")
        return folder

    @property
    def health_command(self) -> list[str]:
        """What HEALTHCHECK says."""
        kind, *words = self.settings["Healthcheck"]["Test"]
        assert kind == "CMD"
        return list(words)

    def command(
        self, words: Sequence[str], environment: Mapping[str, str], mounts: Sequence[Mount] = (), name: str = "test"
    ) -> list[str]:
        """The command that runs `words` in the image, as a runtime would."""
        for mount in mounts:  # as a runtime, which makes them in the container's own layer
            (self.root / mount.target.lstrip("/")).mkdir(parents=True, exist_ok=True)
        known = dict(entry.split("=", 1) for entry in self.settings["Env"])
        variables = [f"{variable}={value}" for variable, value in {**known, **environment}.items()]
        return [
            *("unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"),
            *("sh", "-c", START, "start", str(self.root), self.settings["User"], name),
            *(f"{mount.mode}:{mount.source}:{mount.target}" for mount in mounts),
            *("--", *variables, "env", "-C", self.settings["WorkingDir"], *words),
        ]

    def run(
        self, *words: str, environment: Mapping[str, str] | None = None, mounts: Sequence[Mount] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in the image to its end."""
        command = self.command(words, environment or {}, mounts)
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@dataclass(slots=True)
class Container:
    """A process of an image, the first one of its namespace."""

    name: str
    image: Image
    environment: Mapping[str, str]
    mounts: Sequence[Mount]
    health_command: Sequence[str]
    log: Path
    process: asyncio.subprocess.Process | None = field(default=None)

    async def start(self) -> None:
        """Starts what the image says."""
        command = self.image.command(self.image.settings["Cmd"], self.environment, self.mounts, self.name)
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *guarded(command), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    async def is_healthy(self) -> bool:
        """Runs the health check once, as `docker exec` would."""
        command = self.image.command(self.health_command, self.environment, self.mounts, self.name)
        check = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        return await check.wait() == 0

    async def wait_until_healthy(self) -> None:
        """Returns when the health check succeeds; fails where the process ends before."""
        assert self.process is not None
        while not await self.is_healthy():
            assert self.process.returncode is None, self.log.read_text()
            await asyncio.sleep(HEALTH_RETRY_S)

    async def end(self, number: int) -> int:
        """Sends a signal to the process, and returns the exit code as a shell says it: 128 more than its signal."""
        assert self.process is not None
        os.kill(first_process(self.process.pid), number)
        return await self.process.wait() % 256

    async def discard(self) -> None:
        """Ends it if it has not ended: the end of `unshare` is that of its child."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


def first_process(pid: int) -> int:
    """Returns the process in the image that a process of `Image.command` has started."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


_REASON = reason_to_skip()
NEEDS_IMAGES = [pytest.mark.skipif(_REASON is not None, reason=str(_REASON)), pytest.mark.timeout(7200)]
