"""How a model pools, from the files of its folder or from the setting.

The files are those of sentence-transformers: `modules.json` lists modules, each with a folder of its own, and a model
for scores ends with a LogitScore. A checkpoint for sequence classification with one class has a layer of its own for
the score. Modules that cannot be applied are refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from inflight.common.model_source import ModelError, ModelSource, load_tokenizer, read_json
from inflight.executor.checkpoint.files import CLASSIFIER_WEIGHTS, MODULES_FILE, is_classifier, weight_files
from inflight.executor.checkpoint.quantized_weight import dense_matrix
from inflight.executor.forward.transformers import hidden_size_of
from inflight.executor.pooling.pooled import Pooling, PoolingKind

# Names of pooling in 1_Pooling/config.json, as one setting or as a switch for each.
MODES = {"lasttoken": PoolingKind.LAST, "mean": PoolingKind.MEAN}
SWITCHES = {"pooling_mode_lasttoken": "lasttoken", "pooling_mode_mean_tokens": "mean"}
# Of configurations, factors and bounds of logits, which a score of two rows of the output layer would not have.
CHANGES_OF_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
YES, NO = "yes", "no"


def read_pooling(network: PreTrainedModel, source: ModelSource, name: str) -> Pooling | None:
    """Returns how a model pools by the setting `name`: `auto`, as its files say; `off`; `last`, `mean`, `yes_no`.
    Raises `ModelError`."""
    size = hidden_size_of(network)
    match name:
        case "off":
            return None
        case "last" | "mean":
            return Pooling(PoolingKind(name), size, is_normalized=True)
        case "yes_no":
            return _yes_no(network, *_answers(source))
    if source.gguf_file is not None:
        return None
    folder = source.folder
    if is_classifier(folder):
        return _classifier(network, folder)
    if (folder / MODULES_FILE).is_file():
        return _of_modules(network, folder, size)
    return None


def _of_modules(network: PreTrainedModel, folder: Path, size: int) -> Pooling:
    try:
        modules = json.loads((folder / MODULES_FILE).read_text(encoding="utf-8"))
        found = {str(one["type"]).rpartition(".")[2]: str(one["path"]) for one in modules}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{MODULES_FILE}: is not a list of modules with type and path") from error
    kinds = list(found)
    if kinds == ["Transformer", "LogitScore"]:
        config = read_json(folder / found["LogitScore"] / "config.json")
        return _yes_no(network, config.get("true_token_id"), config.get("false_token_id"), is_only=True)
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelError(
            f"{MODULES_FILE}: has the modules {', '.join(kinds)}; Transformer, Pooling and Normalize, or Transformer "
            "and LogitScore can be applied. With --pooling off the model only generates"
        )
    where = Path(found["Pooling"]) / "config.json"
    kind = _pooling_kind(read_json(folder / where), str(where))
    return Pooling(kind, size, is_normalized="Normalize" in found, is_only=True)


def _pooling_kind(config: dict[str, Any], where: str) -> PoolingKind:
    modes = config.get("pooling_mode", [])
    modes = [modes] if isinstance(modes, str) else list(modes)
    modes += [SWITCHES.get(key, key) for key, value in config.items() if key.startswith("pooling_mode_") and value]
    if len(modes) != 1 or modes[0] not in MODES:
        raise ModelError(f"{where}: pools by {', '.join(map(str, modes)) or 'nothing'}; must be one of lasttoken, mean")
    return MODES[modes[0]]


def _answers(source: ModelSource) -> tuple[Any, Any]:
    tokenizer = load_tokenizer(source)
    vocabulary = tokenizer.get_vocab()
    return vocabulary.get(YES), vocabulary.get(NO)


def _yes_no(network: PreTrainedModel, yes: Any, no: Any, *, is_only: bool = False) -> Pooling:
    """Returns the pooling whose logit is that of one token minus that of another, if there is another."""
    head: Any = network.get_output_embeddings()
    config = network.config.get_text_config(decoder=True)
    changes = [name for name in CHANGES_OF_LOGITS if getattr(config, name, None) not in (None, 0, 1)]
    if changes:
        raise ModelError(f"its logits are changed by {', '.join(changes)}, which a score of two tokens is not")
    rows: list[tuple[Tensor, float]] = []
    for token_id in (yes, no):
        if token_id is None and rows:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < head.weight.shape[0]:
            raise ModelError(f"no token ids of a score: {yes!r} for {YES}, {no!r} for {NO}")
        rows.append(_row(head, token_id))
    (weights, bias), *others = rows
    for other, other_bias in others:
        weights, bias = weights - other, bias - other_bias
    return _score(weights, bias, is_only=is_only)


def _row(head: Any, token_id: int) -> tuple[Tensor, float]:
    weight = head.weight
    row = (
        weight[token_id]
        if isinstance(weight, Tensor)
        else dense_matrix(weight.rows(token_id, token_id + 1), torch.float32)[0]
    )
    return row.float().cpu(), 0.0 if getattr(head, "bias", None) is None else float(head.bias[token_id])


def _classifier(network: PreTrainedModel, folder: Path) -> Pooling:
    """Returns the pooling of a checkpoint for sequence classification."""
    tensors: dict[str, Tensor] = {}
    for name in weight_files(folder):
        with safe_open(folder / name, framework="pt") as file:
            tensors |= {key: file.get_tensor(key) for key in CLASSIFIER_WEIGHTS if key in set(file.keys())}
    weight = tensors.get("score.weight")
    if weight is None or tuple(weight.shape) != (1, hidden_size_of(network)):
        shape = "none" if weight is None else str(list(weight.shape))
        raise ModelError(
            f"its score.weight is {shape}; a classifier must have one class, of {hidden_size_of(network)} numbers"
        )
    bias = tensors.get("score.bias")
    return _score(weight[0].float(), 0.0 if bias is None else float(bias[0]), is_only=True)


def _score(weights: Tensor, bias: float, *, is_only: bool) -> Pooling:
    numbers = tuple(weights.tolist())
    return Pooling(PoolingKind.SCORE, len(numbers), is_only=is_only, weights=numbers, bias=bias)
