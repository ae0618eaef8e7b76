"""The generator of the blocking client: takes the asynchronous one and drops what is asynchronous about it.

`make sync-client` writes the files; `test_sync_client` compares them. What gRPC's two APIs do not share is in
`aio_connection` and `sync_connection`, which are both written by hand.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parents[1] / "inflight"
GENERATED = {"aio.py": "sync.py", "aio_stream.py": "sync_stream.py"}
HEADER = "# Generated from {source} by `make sync-client`. Do not edit.\n"

# Applied in this order to code and docstrings alike.
REPLACEMENTS = (
    (r"(?m)^.*\bshare_calls\b.*\n", ""),
    (r"\basync (def|for|with)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\b__a(enter|exit|iter)__\b", r"__\1__"),
    (r"\baclosing\b", "closing"),
    (r"\bAsync(CancelFlag|Client|Connection|Generator|Iterator|StreamCalls|Stream)\b", r"\1"),
    (r"\baio_(connection|stream)\b", r"sync_\1"),
    (r"\basynchronous\b", "blocking"),
    (r"\banother task\b", "another thread"),
)
RUFF = (
    ("check", "--fix", "--unsafe-fixes", "--quiet", "--select", "I,UP028"),
    ("format", "--quiet"),
)


def blocking(source: str) -> str:
    """The blocking form of a file of the asynchronous client."""
    text = (CLIENT / source).read_text(encoding="utf-8")
    for pattern, replacement in REPLACEMENTS:
        text = re.sub(pattern, replacement, text)
    for arguments in RUFF:
        command = (sys.executable, "-m", "ruff", *arguments, "--stdin-filename", str(CLIENT / source), "-")
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    return HEADER.format(source=source) + text


if __name__ == "__main__":
    for source, target in GENERATED.items():
        (CLIENT / target).write_text(blocking(source), encoding="utf-8")
