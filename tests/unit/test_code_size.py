"""The figures of the size of the code, in a repository of a few files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.code_size import changed_product_files, lines_of, table


def commit(files: dict[str, str]) -> str:
    for path, text in files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    for arguments in (("add", "-A"), (*who, "commit", "-q", "-m", "one")):
        subprocess.run(("git", *arguments), check=True)
    return subprocess.run(("git", "rev-parse", "HEAD"), check=True, capture_output=True, text=True).stdout.strip()


def test_generated_code_documents_and_tests_are_no_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    subprocess.run(("git", "init", "-q"), check=True)
    before = commit(
        {
            "router/a.py": "1\n2\n",
            "router/scripts/a.lua": "1\n",
            "inflight/v1/a_pb2.py": "1\n",
            "bench/a.py": "1\n2\n3\n",
            "docs/a.md": "1\n",
        }
    )
    assert lines_of(before) == {"router": 3, "bench": 3}
    after = commit(
        {
            "router/a.py": "1\n2\n3\n",
            "protos/inflight/v1/a.proto": "1\n",
            "inflight/v1/a_pb2.py": "2\n",
            "docs/a.md": "2\n",
            "tests/a.py": "1\n",
        }
    )
    assert changed_product_files(before, after) == ["protos/inflight/v1/a.proto", "router/a.py"]
    rows = [line.split() for line in table([before, after])]
    assert ["product", "3", "4"] in rows
    assert ["tests", "0", "1"] in rows
