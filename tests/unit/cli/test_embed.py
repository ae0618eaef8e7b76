"""`inflight embed`: texts and files in, JSON and NumPy's format out, and what is refused."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from inflight.cli.embed import main as embed
from inflight.cli.main import main
from tests.unit.scripted_router import ScriptedRouter, asked


def test_texts_give_a_line_of_json_each(output: Callable[..., str], router: ScriptedRouter) -> None:
    shown = output("embed", "ab", "cde", "--dimensions", "2", "--model", "m", "--tenant", "t", "--priority", "batch")

    (request,) = asked(router)
    assert [one.text for one in request.inputs] == ["ab", "cde"]
    assert (request.dimensions, request.model, request.tenant) == (2, "m", "t")
    assert [json.loads(line) for line in shown.splitlines()] == [
        {"index": 0, "prompt_tokens": 2, "embedding": [2.0, 1.0]},
        {"index": 1, "prompt_tokens": 3, "embedding": [3.0, 1.0]},
    ]


@pytest.mark.parametrize("num_columns", [2, 1000])
def test_lines_of_a_file_become_a_matrix(
    output: Callable[..., str],
    router: ScriptedRouter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_columns: int,
) -> None:
    monkeypatch.setattr(embed, "TEXTS_PER_CALL", 2)
    router.embedding = lambda text: [len(text) + 0.25] * num_columns
    texts = ["één", " a b ", "zz"]
    (tmp_path / "in.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    assert output("embed", "--file", "in.txt", "--output", "out.npy") == ""

    assert [[one.text for one in request.inputs] for request in asked(router)] == [texts[:2], texts[2:]]
    matrix = np.load(tmp_path / "out.npy", allow_pickle=False)
    assert matrix.dtype == np.float32
    assert (matrix == np.array([[len(text) + 0.25] * num_columns for text in texts], np.float32)).all()


def test_standard_input_is_read_and_json_is_written(
    output: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"abcd")))
    output("embed", "--file", "-", "--output", "out.jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_text()) == {
        "index": 0,
        "prompt_tokens": 4,
        "embedding": [4.0, 1.0],
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give texts or --file"),
        (("a", "--file", "in.txt"), "give texts or --file"),
        (("a", " "), "texts: text 2 is empty"),
        (("--file", "in.txt"), "in.txt: text 2 is empty"),
        (("--file", "empty.txt"), "empty.txt has no line"),
        (("--file", "latin.txt"), "latin.txt is not UTF-8"),
        (("--file", "none.txt"), "cannot read none.txt: No such file"),
        (("a", "--output", "out.csv"), "'out.csv' must end with .npy, .json or .jsonl"),
        (("a", "--dimensions", "0"), "--dimensions: must be at least 1"),
        (("a", "--output", "none/out.npy"), "--output: cannot write none/out.npy"),
    ],
)
def test_wrong_use_is_told(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "in.txt").write_text("a\n\nb\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    try:
        code = main(["embed", *arguments, "--address", address])
    except SystemExit as ended:
        code = ended.code  # type: ignore[assignment]
    assert code in (1, 2)
    assert words in capsys.readouterr().err
