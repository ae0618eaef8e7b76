"""`inflight embed`: the embeddings of texts, as JSON lines or as a matrix in NumPy's format."""

from __future__ import annotations

import argparse
import json
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

from inflight.cli.console import EXIT_USAGE, CommandError
from inflight.cli.flags import add_connection_flags, connected
from inflight.cli.parser import CommandParser
from inflight.embeddings.calls import Embedding, EmbedOptions
from inflight.requests import PRIORITIES
from inflight.sync import Client

EXAMPLE = 'inflight embed "a text" "another one"'
# Texts of a call. Their results are below the protocol's limit up to 6,144 numbers each.
TEXTS_PER_CALL = 1024
NPY = ".npy"
# https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html, version 1.0
NPY_MAGIC, NPY_ALIGNMENT = b"\x93NUMPY\x01\x00", 64


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    flags = _parser().parse_args(argv)
    if flags.dimensions is not None and flags.dimensions < 1:
        raise CommandError("--dimensions: must be at least 1", EXIT_USAGE)
    texts = _texts(flags)
    with connected(flags) as client:
        embeddings = _embed(client, texts, flags)
    if flags.output is None:
        sys.stdout.writelines(json_lines(embeddings))
        return 0
    is_npy = flags.output.suffix == NPY
    content = npy(embeddings) if is_npy else "".join(json_lines(embeddings)).encode()
    try:
        flags.output.write_bytes(content)
    except OSError as error:
        raise CommandError(f"--output: cannot write {flags.output}: {error.strerror}") from None
    return 0


def json_lines(embeddings: Iterable[Embedding]) -> Iterable[str]:
    """Yields a line of JSON for each embedding."""
    for index, one in enumerate(embeddings):
        yield json.dumps({"index": index, "prompt_tokens": one.prompt_tokens, "embedding": one.values}) + "\n"


def npy(embeddings: Sequence[Embedding]) -> bytes:
    """Returns the file of a matrix float32 (embeddings, dimensions)."""
    num_columns = len(embeddings[0].values)
    shape = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({len(embeddings)}, {num_columns}), }}"
    head = len(NPY_MAGIC) + 2
    length = -(-(head + len(shape) + 1) // NPY_ALIGNMENT) * NPY_ALIGNMENT - head
    values = array("f", (value for one in embeddings for value in one.values))
    if sys.byteorder == "big":
        values.byteswap()
    header = struct.pack("<H", length) + shape.ljust(length - 1).encode() + b"\n"
    return NPY_MAGIC + header + values.tobytes()


def _embed(client: Client, texts: Sequence[str], flags: argparse.Namespace) -> list[Embedding]:
    given = {"model": flags.model, "tenant": flags.tenant, "priority": flags.priority}
    options: EmbedOptions = {name: value for name, value in given.items() if value is not None}  # type: ignore[assignment]
    embeddings: list[Embedding] = []
    for start in range(0, len(texts), TEXTS_PER_CALL):
        part = texts[start : start + TEXTS_PER_CALL]
        embeddings += client.embed(part, dimensions=flags.dimensions, timeout=flags.timeout, **options)
    return embeddings


def _texts(flags: argparse.Namespace) -> list[str]:
    """Returns the texts of the command line, or the lines of a file."""
    if bool(flags.texts) == (flags.file is not None):
        raise CommandError(f"give texts or --file; example: {EXAMPLE}", EXIT_USAGE)
    texts = list(flags.texts) if flags.file is None else _lines(flags.file)
    for number, text in enumerate(texts, 1):
        if not text.strip():
            where = "texts" if flags.file is None else flags.file
            raise CommandError(f"{where}: text {number} is empty", EXIT_USAGE)
    if not texts:
        raise CommandError(f"--file: {flags.file} has no line", EXIT_USAGE)
    return texts


def _lines(file: str) -> list[str]:
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return content.decode().removesuffix("\n").split("\n") if content else []
    except OSError as error:
        raise CommandError(f"--file: cannot read {file}: {error.strerror}", EXIT_USAGE) from None
    except UnicodeDecodeError:
        raise CommandError(f"--file: {file} is not UTF-8", EXIT_USAGE) from None


def _output(name: str) -> Path:
    path = Path(name)
    if path.suffix not in (NPY, ".json", ".jsonl"):
        raise argparse.ArgumentTypeError(f"{name!r} must end with .npy, .json or .jsonl")
    return path


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="inflight embed",
        description="Prints the embeddings of texts as lines of JSON, with a model that makes embeddings. If one text "
        "is refused or fails, nothing is printed.",
    )
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="a text")
    parser.add_argument("--file", metavar="FILE", help="embed each line of this file; - reads standard input")
    parser.add_argument(
        "--output",
        type=_output,
        metavar="FILE",
        help="write to this file instead: .npy, a matrix of float32 in NumPy's format; .json or .jsonl, lines of JSON",
    )
    parser.add_argument(
        "--dimensions", type=int, metavar="N", help="keep the first N numbers, for models that were trained for that"
    )
    parser.add_argument("--model", metavar="NAME", help="model; default: the only one")
    parser.add_argument("--tenant", metavar="NAME", help="tenant of the request; default: default")
    parser.add_argument("--priority", choices=PRIORITIES, help="priority class; default: standard")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="most seconds of a call of 1,024 texts")
    add_connection_flags(parser)
    return parser
