"""Tokens that end an output, from all files of a model that name one.

The files often differ: a fine-tuned model ends its turns with another token than its base, and only its tokenizer or
its chat template says so. An output that does not stop at the end of a turn goes on as the user. So the ids are the
union of those of generation_config.json, config.json, the tokenizer and the end of a message in the chat template, and
for a GGUF file of the texts at which llama.cpp stops.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from inflight.common.model_source import ModelError, ModelSource, load_tokenizer, read_json

log = logging.getLogger(__name__)

# Texts at which llama.cpp stops (src/llama-vocab.cpp). One that may occur in plain text counts only as an added token.
TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>"),
)
_ANSWER = "inflight looks for what follows this answer"


def find_end_tokens(
    source: ModelSource, folder: Path, vocabulary_size: int, given: Sequence[int] = ()
) -> tuple[int, ...]:
    """Returns the ids, and logs where each comes from. With `given` they are those alone. Raises `ModelError` for an id
    outside the vocabulary."""
    if given:
        named = [(token_id, "the setting eos_token_ids") for token_id in given]
        _check("eos_token_ids", given, vocabulary_size)
        tokenizer = None
    else:
        tokenizer = _tokenizer(source)
        named = [*_of_files(source, folder, vocabulary_size), *_of_tokenizer(source, tokenizer, vocabulary_size)]
    places: dict[int, list[str]] = {}
    for token_id, place in named:
        places.setdefault(token_id, []).append(place)
    if not places:
        log.warning("no token that ends an output is known; set eos_token_ids")
    for token_id, names in places.items():
        text = f" ({tokenizer.convert_ids_to_tokens(token_id)})" if tokenizer is not None else ""
        log.info("token %d%s ends an output, by %s", token_id, text, ", ".join(names))
    return tuple(places)


def _of_files(source: ModelSource, folder: Path, vocabulary_size: int) -> Iterator[tuple[int, str]]:
    # In config.json of an imported GGUF file may be defaults of transformers.
    names = ("generation_config.json", *(("config.json",) if source.gguf_file is None else ()))
    for name in names:
        config = read_json(folder / name)
        for fields in (config, config.get("text_config")):
            value = fields.get("eos_token_id") if isinstance(fields, dict) else None
            token_ids = value if isinstance(value, list) else [] if value is None else [value]
            _check(f"{name}: eos_token_id", token_ids, vocabulary_size)
            yield from ((token_id, name) for token_id in token_ids)


def _of_tokenizer(source: ModelSource, tokenizer: Any, vocabulary_size: int) -> Iterator[tuple[int, str]]:
    """Yields the ids that the model has a row for; its tokenizer may have more."""
    if tokenizer is None:
        return
    found = [(tokenizer.eos_token_id, "the tokenizer"), (_end_of_turn(tokenizer), "the chat template")]
    if source.gguf_file is not None:
        vocabulary, added = tokenizer.get_vocab(), set(map(str, tokenizer.added_tokens_decoder.values()))
        texts = (text for text in TEXTS if text in added or (text in vocabulary and text.startswith("<|")))
        found += [(vocabulary[text], "its text, as in llama.cpp") for text in texts]
    yield from ((token_id, place) for token_id, place in found if token_id is not None and token_id < vocabulary_size)


def _end_of_turn(tokenizer: Any) -> int | None:
    """Returns the added token that the chat template writes after a message of the assistant."""
    if not tokenizer.chat_template:
        return None
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:
        # The template is the model's program: it may raise any exception.
        log.info("the chat template does not show the end of a turn: %s", str(error)[:200])
        return None
    _, answer, rest = rendered.rpartition(_ANSWER)
    added = {str(token): token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
    following = [text for text in added if text and rest.lstrip().startswith(text)] if answer else []
    return added[max(following, key=len)] if following else None


def _tokenizer(source: ModelSource) -> Any:
    try:
        return load_tokenizer(source)
    except ModelError as error:
        log.warning("the tokens with which the tokenizer and the chat template end an output are not known: %s", error)
        return None


def _check(what: str, token_ids: Sequence[Any], vocabulary_size: int) -> None:
    for token_id in token_ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocabulary_size:
            raise ModelError(
                f"{what} is {token_id!r}; must be from 0 to {vocabulary_size - 1}. The setting eos_token_ids replaces "
                "the ids of the model's files"
            )
