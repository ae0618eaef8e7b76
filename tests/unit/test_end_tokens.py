"""Tokens that end an output: all files of a model that name one count, the log says which, a setting replaces them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import PreTrainedTokenizerBase

import inflight.common.model_source as model_source
from inflight.common.model_source import ModelError, resolve_model
from inflight.executor.model.end_tokens import find_end_tokens
from tests.support.checkpoints.quantized_checkpoints import add_keys, add_vocabulary
from tests.support.text.chat_models import gemma, llama_3, mistral, phi, qwen_3

SIZE = 100_000


def folder_of(
    folder: Path,
    generation: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Path:
    folder.mkdir()
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps(config or {}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def found_in(folder: Path, size: int = SIZE, given: tuple[int, ...] = ()) -> tuple[int, ...]:
    source = resolve_model(str(folder))
    return find_end_tokens(source, source.folder, size, given)


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": [7, 8]}, {}, (7, 8)),
        ({"eos_token_id": 7}, {"eos_token_id": 1}, (7, 1)),
        ({"eos_token_id": None}, {"eos_token_id": 1}, (1,)),
        ({}, {"eos_token_id": 1}, (1,)),
        (None, {"eos_token_id": [1, 2]}, (1, 2)),
        ({}, {"text_config": {"eos_token_id": [2]}}, (2,)),
        ({}, {"text_config": None, "eos_token_id": None}, ()),
        ({}, {}, ()),
    ],
)
def test_ids_are_those_of_both_configurations(
    tmp_path: Path, generation: dict[str, Any] | None, config: dict[str, Any], ids: tuple[int, ...]
) -> None:
    assert found_in(folder_of(tmp_path / "model", generation, config)) == ids


@pytest.mark.parametrize(
    ("build", "end"),
    [
        (llama_3, "<|eot_id|>"),
        (phi, "<|end|>"),
        (qwen_3, "<|im_end|>"),
        (mistral, "</s>"),
        (gemma, "<end_of_turn>"),
    ],
)
def test_token_that_the_chat_template_writes_after_a_message_ends_an_output(
    build: Any, end: str, tmp_path: Path
) -> None:
    tokenizer = build()
    # Given files in which only another token ends a sequence
    folder = folder_of(tmp_path / "model", {"eos_token_id": 0}, {"eos_token_id": 0}, tokenizer)
    assert tokenizer.convert_tokens_to_ids(end) in found_in(folder)


def test_token_that_only_the_tokenizer_names_ends_an_output(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = qwen_3()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    folder = folder_of(tmp_path / "model", {"eos_token_id": 0}, {"eos_token_id": 0}, tokenizer)
    name = json.loads((folder / "tokenizer_config.json").read_text())
    name["eos_token"] = "<|im_end|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(name))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    with caplog.at_level("INFO"):
        assert found_in(folder) == (0, end)
    assert "ends an output, by generation_config.json, config.json" in caplog.text
    assert f"token {end} (<|im_end|>) ends an output, by the tokenizer" in caplog.text


def test_token_that_the_model_has_no_row_for_is_left_out(tmp_path: Path) -> None:
    tokenizer = qwen_3()
    end = int(str(tokenizer.convert_tokens_to_ids("<|im_end|>")))
    assert end not in found_in(folder_of(tmp_path / "model", {"eos_token_id": 0}, {}, tokenizer), size=end)


def test_setting_replaces_the_ids_of_the_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_of(tmp_path / "model", {"eos_token_id": -1}, {"eos_token_id": 3}, qwen_3())
    with caplog.at_level("INFO"):
        assert found_in(folder, given=(5, 6)) == (5, 6)
    assert "token 5 ends an output, by the setting eos_token_ids" in caplog.text
    with pytest.raises(ModelError, match="eos_token_ids is 100; must be from 0 to 99"):
        found_in(folder, 100, (5, 100))


@pytest.mark.parametrize("wrong", [-1, 100, "2", 1.5, True, [2, -1], [None]])
def test_id_outside_the_vocabulary_is_refused_with_its_file(wrong: Any, tmp_path: Path) -> None:
    for name in ("generation_config.json", "config.json"):
        files: dict[str, Any] = {"generation": {"eos_token_id": 1}, "config": {"eos_token_id": 1}}
        files[name.removesuffix("_config.json").removesuffix(".json")] = {"eos_token_id": wrong}
        folder = folder_of(tmp_path / name, **files)
        with pytest.raises(ModelError, match=rf"^{name}: eos_token_id is .*; must be from 0 to 99"):
            found_in(folder, 100)


def test_model_without_an_end_is_served_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert found_in(folder_of(tmp_path / "model")) == ()
    assert "no token that ends an output is known; set eos_token_ids" in caplog.text


def test_gguf_files_end_at_the_texts_of_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "cache_folder", lambda: tmp_path / "cache")
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    add_vocabulary(writer)
    tokens = writer.kv_data[0]["tokenizer.ggml.tokens"].value
    # Given a file whose keys name only token 1, beside two that llama.cpp knows by their texts and one in plain text
    tokens[0], tokens[2], tokens[100] = "<|im_end|>", "<|endoftext|>", "</s>"
    writer.kv_data[0].pop("tokenizer.ggml.eot_token_id")
    add_keys(writer, "llama", {"context_length": 128})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "generation_config.json").write_text('{"eos_token_id": [1]}')
    source = resolve_model(str(tmp_path / "tiny.gguf"))
    assert find_end_tokens(source, tmp_path / "config", SIZE) == (1, 0, 2)
