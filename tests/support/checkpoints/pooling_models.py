"""Tiny models for embeddings and scores, and what sentence-transformers computes with them.

The oracle is the network of transformers, on one prompt at a time, and the arithmetic of sentence-transformers' modules
`Pooling`, `Normalize` and `LogitScore`, which is written out here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModelForCausalLM, Qwen3Config

from inflight.bench.fleet.tiny_model import write_tokenizer
from tests.support.checkpoints.tiny_models import save_model, sizes

WORDS = ("yes", "no", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
# What Qwen3 writes around messages when nothing is to be thought.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TYPES = "sentence_transformers.models"


def write_qwen3(folder: Path, *, seed: int = 0, tied: bool = True, **changes: Any) -> dict[str, int]:
    """Writes a Qwen3 of random weights with a tokenizer of bytes. Returns the vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = write_tokenizer(folder, WORDS)
    config = Qwen3Config(
        **sizes(vocab_size=len(vocabulary), max_position_embeddings=1024, eos_token_id=vocabulary["<end>"], **changes),
        tie_word_embeddings=tied,
    )
    save_model(config, folder, seed, has_random_vectors=True)
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) | {"chat_template": CHAT_TEMPLATE}
    path.write_text(json.dumps(settings), encoding="utf-8")
    return vocabulary


def write_embedding_model(
    folder: Path, mode: str = "lasttoken", *, normalizes: bool = True, tied: bool = False, seed: int = 0
) -> Path:
    """Writes a model in the form of Qwen3-Embedding: tensors without the prefix `model.` and no output layer."""
    write_qwen3(folder, seed=seed, tied=tied)
    path = folder / "model.safetensors"
    tensors = {name.removeprefix("model."): one for name, one in load_file(path).items() if name != "lm_head.weight"}
    save_file(tensors, path, metadata={"format": "pt"})
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalizes else [])]
    write_modules(folder, modules)
    switches = {f"pooling_mode_{name}": False for name in ("cls_token", "max_tokens", "mean_tokens", "lasttoken")}
    chosen = {
        "lasttoken": "pooling_mode_lasttoken",
        "mean": "pooling_mode_mean_tokens",
        "cls": "pooling_mode_cls_token",
    }
    config = {"word_embedding_dimension": 64, **switches, chosen[mode]: True, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_modules(folder: Path, modules: Sequence[tuple[str, str]]) -> None:
    """Writes `modules.json` and the folders of the modules."""
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"{TYPES}.{kind}"} for i, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    for path, _ in modules:
        (folder / path).mkdir(exist_ok=True)


def write_classifier(folder: Path, num_classes: int = 1) -> Path:
    """Writes a checkpoint of `Qwen3ForSequenceClassification`."""
    write_qwen3(folder)
    path = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(path) | {"score.weight": torch.randn((num_classes, 64), generator=generator)}
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = ["Qwen3ForSequenceClassification"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


class Oracle:
    """What sentence-transformers computes with the network of a folder."""

    def __init__(self, folder: Path) -> None:
        network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._network = network.eval()

    def _states(self, prompt: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            states: Tensor = self._network.model(torch.tensor([list(prompt)])).last_hidden_state[0]
            return states

    def embedding(self, prompt: Sequence[int], mode: str = "lasttoken", dimensions: int = 64) -> Tensor:
        """Returns the normalized embedding `[dimensions]`."""
        states = self._states(prompt)
        pooled = states[-1] if mode == "lasttoken" else states.sum(0) / len(states)
        return normalize(pooled[:dimensions], dim=0)

    def yes_no(self, prompt: Sequence[int], yes: int, no: int) -> float:
        """Returns the share of `yes` in the softmax of both logits of the last position."""
        with torch.inference_mode():
            logits = self._network(torch.tensor([list(prompt)])).logits[0, -1]
        return float(torch.softmax(logits[[no, yes]], 0)[1])

    def classified(self, prompt: Sequence[int], weight: Tensor) -> float:
        """Returns the sigmoid of a classifier's only class."""
        return float(torch.sigmoid(self._states(prompt)[-1] @ weight[0]))
