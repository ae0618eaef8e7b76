"""Import of a GGUF file as a Hugging Face folder: once, complete, and with exactly the dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import inflight.common.model_source as model_source
from inflight.common.model_source import ModelError, ModelSource, load_tokenizer, resolve_model
from inflight.executor.checkpoint.gguf import import_gguf
from inflight.executor.model.model import PagedModel
from tests.support.checkpoints.quantized_checkpoints import NUM_TOKENS, add_vocabulary

HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_LAYERS = 64, 96, 4, 1


def write_gguf(
    path: Path, architecture: str = "llama", *, basename: str = "", chat_template: str = "", temperature: float = 0.5
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """A tiny Llama, one matrix of it in Q4_1; returns that matrix as it is dequantised."""
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // NUM_HEADS)
    add_vocabulary(writer)
    if temperature:
        writer.add_float32("general.sampling.temp", temperature)
    if basename:
        writer.add_basename(basename)
    if chat_template:
        writer.add_chat_template(chat_template)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, generator.standard_normal(shape, np.float32) * np.float32(0.1))

    add("token_embd.weight", NUM_TOKENS, HIDDEN)
    add("output_norm.weight", HIDDEN)
    for name in ("attn_norm", "ffn_norm"):
        add(f"blk.0.{name}.weight", HIDDEN)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        add(f"blk.0.{name}.weight", HIDDEN, HIDDEN)
    for name in ("ffn_gate", "ffn_up"):
        add(f"blk.0.{name}.weight", INTERMEDIATE, HIDDEN)
    down = gguf.quantize(generator.standard_normal((HIDDEN, INTERMEDIATE), np.float32), gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("blk.0.ffn_down.weight", down, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    dequantised: np.ndarray[tuple[int, int], np.dtype[np.float32]] = gguf.dequantize(
        down, gguf.GGMLQuantizationType.Q4_1
    )
    return dequantised


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSource:
    # Only of models: the kernels are those that other tests have compiled
    monkeypatch.setattr(model_source, "cache_folder", lambda: tmp_path / "cache")
    write_gguf(tmp_path / "tiny.Q4_1.gguf")
    return resolve_model(str(tmp_path / "tiny.Q4_1.gguf"))


def test_weights_are_exactly_the_dequantised_ones(source: ModelSource) -> None:
    assert source.gguf_file is not None
    expected = write_gguf(source.gguf_file)
    folder = import_gguf(source)
    weight = load_file(folder / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert weight.dtype == torch.float32
    assert torch.equal(weight, torch.from_numpy(expected))
    assert not torch.equal(weight.half().float(), weight), "float16 would not have held it"


def test_folder_is_complete_and_made_once(source: ModelSource, capfd: pytest.CaptureFixture[str]) -> None:
    folder = import_gguf(source)
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}

    assert import_gguf(source) == folder

    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == times
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in times}
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [1, 2], "temperature": 0.5}
    assert resolve_model(str(folder)).gguf_file is None, "it is a model folder like any other"
    output = capfd.readouterr()
    assert "%" not in output.out + output.err, "no progress bars"


TEMPLATE = "{{ messages[0]['content'] }}"


@pytest.mark.parametrize(
    ("keys", "sampling"),
    [
        ({"basename": "smollm2", "chat_template": TEMPLATE}, {"do_sample": True, "temperature": 0.2, "top_p": 0.9}),
        ({"basename": "smollm2", "chat_template": ""}, {}),
        ({"basename": "other", "chat_template": TEMPLATE}, {}),
        ({"basename": "smollm2", "chat_template": TEMPLATE, "temperature": 0.5}, {"temperature": 0.5}),
    ],
    ids=["known chat model", "its base model", "unknown model", "the file's own values come first"],
)
def test_recommended_sampling_of_a_known_chat_model_is_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], sampling: dict[str, Any]
) -> None:
    monkeypatch.setattr(model_source, "cache_folder", lambda: tmp_path / "cache")
    write_gguf(tmp_path / "tiny.gguf", **{"temperature": 0.0, **keys})
    folder = import_gguf(resolve_model(str(tmp_path / "tiny.gguf")))
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [1, 2], **sampling}


def test_model_imported_by_an_older_version_is_imported_again(source: ModelSource) -> None:
    # Given a folder from before recommended sampling was known: version 1 of imports
    assert source.gguf_file is not None
    write_gguf(source.gguf_file, basename="smollm2", chat_template=TEMPLATE, temperature=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_source, "IMPORT_VERSION", b"1")
        old = import_gguf(resolve_model(str(source.gguf_file)))
        (old / "generation_config.json").write_text("{}")

    new = import_gguf(resolve_model(str(source.gguf_file)))

    assert json.loads((new / "generation_config.json").read_text())["temperature"] == 0.2


@pytest.mark.slow
def test_model_runs_and_knows_its_stop_tokens(source: ModelSource) -> None:
    model = PagedModel.load(source, dtype_name="float32", backend_name="reference", device_name="cpu")
    description = model.description
    assert (description.eos_token_ids, description.context_length) == ((1, 2), 128)
    sampling = description.defaults.sampling
    assert (sampling["temperature"], sampling.get("top_k")) == (0.5, None)
    assert description.revision == source.revision


def test_tokenizer_alone_does_not_import_weights(source: ModelSource) -> None:
    tokenizer = load_tokenizer(source)
    # Digits are split off first, as this vocabulary was trained: two line feeds before one stay together.
    vocabulary = tokenizer.get_vocab()
    assert tokenizer("\n\n1").input_ids == [vocabulary["ĊĊ"], vocabulary["1"]]
    assert [path.name for path in source.import_folder.iterdir() if path.is_dir()] == ["tokenizer"]


def test_truncated_file_is_refused_and_leaves_nothing(source: ModelSource) -> None:
    assert source.gguf_file is not None
    whole = source.gguf_file.read_bytes()
    source.gguf_file.write_bytes(whole[:-1000])
    cut = resolve_model(str(source.gguf_file))
    with pytest.raises(ModelError, match=r"GGUF file .* is truncated: \d+ bytes of at least \d+"):
        import_gguf(cut)
    assert not (cut.import_folder / "model").exists()


@pytest.mark.parametrize("num_bytes", [4, 24, 300])
def test_file_cut_inside_its_header_is_refused(source: ModelSource, num_bytes: int) -> None:
    assert source.gguf_file is not None
    source.gguf_file.write_bytes(source.gguf_file.read_bytes()[:num_bytes])
    with pytest.raises(ModelError, match="is not a GGUF file, or not a whole one"):
        import_gguf(resolve_model(str(source.gguf_file)))


def test_unknown_architecture_is_named(tmp_path: Path, source: ModelSource) -> None:
    write_gguf(tmp_path / "odd.gguf", architecture="oddball")
    with pytest.raises(ModelError, match="oddball"):
        import_gguf(resolve_model(str(tmp_path / "odd.gguf")))
