"""`inflight fetch`: downloads a model into a folder, once, for the volume of a deployment.

The folder is complete or absent: files are downloaded beside it, checked, and renamed into place. A repeated call
continues an interrupted download. Where the folder is there, it compares source and digest and downloads nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from huggingface_hub import snapshot_download

from inflight.cli.console import EXIT_USAGE, CommandError
from inflight.cli.parser import CommandParser
from inflight.common.model_source import HUB_PATTERNS
from inflight.tools.fetching.s3 import Bucket

HUB = re.compile(r"hf://(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
S3 = re.compile(r"s3://(?P<bucket>[\w.-]+)/(?P<prefix>.+)")
DIGEST = re.compile(r"[0-9a-f]{64}")
CHUNK_BYTES = 1 << 22
# In the folder: where it came from. Not part of its digest.
ORIGIN = ".fetched-from"


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    flags = _parser().parse_args(argv)
    if flags.sha256 is not None and not DIGEST.fullmatch(flags.sha256):
        raise CommandError("--sha256 must be 64 hexadecimal digits in lower case", EXIT_USAGE)
    if not HUB.fullmatch(flags.source) and not S3.fullmatch(flags.source):
        raise CommandError(
            f"{flags.source!r} must be hf://ORGANIZATION/NAME, with @REVISION or without, or s3://BUCKET/PREFIX",
            EXIT_USAGE,
        )
    target: Path = flags.folder.absolute()
    try:
        digest = fetch(flags.source, target, flags.sha256, os.environ)
    except OSError as error:
        raise CommandError(f"{flags.source} cannot be downloaded to {target}: {error}") from error
    print(f"{target} sha256 {digest}")
    return 0


def fetch(source: str, target: Path, sha256: str | None, environment: Mapping[str, str]) -> str:
    """Downloads unless the folder is there, and returns its digest.

    Raises CommandError if the folder came from another source or has another digest.
    """
    if target.exists():
        if (before := _origin(target)) not in (source, None):
            raise CommandError(f"{target} came from {before}, not {source}; name another folder or remove it")
        return _checked(target, sha256)
    partial = target.with_name(f".{target.name}.partial")
    if _origin(partial) != source:
        shutil.rmtree(partial, ignore_errors=True)  # of another download, or of none
    partial.mkdir(parents=True, exist_ok=True)
    (partial / ORIGIN).write_text(f"{source}\n")
    if (found := HUB.fullmatch(source)) is not None:
        _fetch_from_hub(found["name"], found["revision"], partial)
    else:
        found = S3.fullmatch(source)
        assert found is not None
        _fetch_from_s3(Bucket.of_environment(found["bucket"], environment), found["prefix"].rstrip("/") + "/", partial)
    if not (partial / "config.json").is_file() and not list(partial.glob("*.gguf")):
        shutil.rmtree(partial)
        raise CommandError(f"{source} is not a model folder: it has no config.json and no *.gguf")
    digest = _checked(partial, sha256)
    os.replace(partial, target)
    return digest


def digest_of(folder: Path) -> str:
    """Returns the SHA-256 of the list of files as `sha256sum` prints it, sorted by path."""
    whole = hashlib.sha256()
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ORIGIN)
    for path in sorted(files, key=lambda path: path.as_posix()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{digest}  {path.relative_to(folder).as_posix()}\n".encode())
    return whole.hexdigest()


def _origin(folder: Path) -> str | None:
    file = folder / ORIGIN
    return file.read_text().strip() if file.is_file() else None


def _checked(folder: Path, sha256: str | None) -> str:
    digest = digest_of(folder)
    if sha256 is not None and digest != sha256:
        raise CommandError(f"{folder} has the digest {digest}, not {sha256}; remove it to download it again")
    return digest


def _fetch_from_hub(name: str, revision: str | None, folder: Path) -> None:
    try:
        snapshot_download(name, revision=revision, local_dir=folder, allow_patterns=list(HUB_PATTERNS))
    except ValueError as error:
        raise CommandError(f"hf://{name}: {error}") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's notes about the download


def _fetch_from_s3(bucket: Bucket, prefix: str, folder: Path) -> None:
    for key, size in bucket.objects(prefix):
        name = key.removeprefix(prefix)
        if not any(fnmatch(name, pattern) for pattern in (*HUB_PATTERNS, "*.gguf")):
            continue
        if ".." in PurePosixPath(name).parts or name.startswith("/"):
            raise CommandError(f"the key {key!r} leads out of the folder")
        path = folder / name
        if path.is_file() and path.stat().st_size == size:
            continue  # renamed into place by an earlier call
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        with bucket.open(key) as response, part.open("wb") as file:
            shutil.copyfileobj(response, file, CHUNK_BYTES)
        if part.stat().st_size != size:
            raise CommandError(f"{key}: {part.stat().st_size} of {size} bytes arrived")
        os.replace(part, path)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="inflight fetch",
        description="Downloads a model from the Hugging Face hub or S3 into a folder that is complete or absent, and "
        "prints the digest of its files. If the folder is there, nothing is downloaded; another source or digest is an "
        "error. Credentials are those of the usual variables: HF_TOKEN; AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
        "AWS_REGION, AWS_ENDPOINT_URL.",
    )
    parser.add_argument("source", metavar="SOURCE", help="hf://ORGANIZATION/NAME[@REVISION] or s3://BUCKET/PREFIX")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder to create, such as /models/NAME")
    parser.add_argument(
        "--sha256", metavar="HEX", help="digest that the files must have, as an earlier call printed it; default: any"
    )
    return parser
