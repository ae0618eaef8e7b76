"""lm-eval, unmodified, through the gateway against its own `hf` backend: the same log likelihoods and accuracy."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoTokenizer

from inflight.common.model_source import resolve_model
from inflight.executor.checkpoint.gguf import import_gguf
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from tests.clients.environments import REPOSITORY
from tests.stack.conftest import EXECUTOR_ARGS
from tests.stack.reference import load_reference

PYTHON = REPOSITORY / ".clients" / "lm-eval" / "bin" / "python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="lm-eval is not installed; make evaluator does that")

MAX_DIFFERENCE = 1e-3
QUESTIONS = (
    ("The capital of France is", (" Paris.", " Rome.", " Berlin.", " Madrid."), 0),
    ("Water freezes at a temperature of", (" one hundred degrees.", " zero degrees Celsius.", " noon."), 1),
    ("A week has", (" five days.", " twelve days.", " seven days."), 2),
    ("The opposite of hot is", (" warm.", " cold.", " red.", " fast."), 1),
    ("Cats and dogs are", (" animals.", " countries.", " numbers."), 0),
    ("Two plus two is", (" nine.", " four.", " Paris."), 1),
    ("The sun rises in the", (" east.", " west.", " cellar."), 0),
    ("Bread is made from", (" stones.", " flour and water.", " glass."), 1),
    ("An octopus has", (" eight arms.", " no arms at all.", " a beak of gold."), 0),
    ("To open a locked door, you need a", (" sandwich.", " cloud.", " key."), 2),
    ("The largest planet of the solar system is", (" Jupiter.", " Mars.", " the Moon."), 0),
    ("Émile Zola was a French", (" novelist.", " swimmer – 游泳者.", " river."), 0),
)
TASKS = {
    "local_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "local_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
}


def texts() -> list[str]:
    """Pieces of our own documentation. The longest needs many steps."""
    pages = re.split(r"\n## ", (REPOSITORY / "docs" / "concepts.md").read_text(encoding="utf-8"))
    return [page[:length] for page, length in zip(pages[1:], (120, 700, 1400), strict=False)]


def write_tasks(folder: Path) -> None:
    """Writes the tasks and their documents."""
    documents: dict[str, list[dict[str, Any]]] = {
        "local_choice": [{"question": q, "choices": choices, "answer": answer} for q, choices, answer in QUESTIONS],
        "local_text": [{"text": text} for text in texts()],
    }
    for name, task in TASKS.items():
        path = folder / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, documents[name])), encoding="utf-8")
        where = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test"}
        text = json.dumps({"task": name, **where, **task, "metadata": {"version": 1}})  # JSON is YAML
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results by backend."""
    folder = tmp_path_factory.mktemp("lm-eval")
    tasks, results = folder / "tasks", folder / "results.json"
    tasks.mkdir()
    write_tasks(tasks)
    model = import_gguf(resolve_model(""))
    options = StackOptions(gateways=1, executor_args=(*EXECUTOR_ARGS, *LARGER), run_dir=folder / "run")
    offline = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    async with LocalStack(options) as stack:
        gateway = f"http://{stack.gateway_addresses[0]}"
        process = await asyncio.create_subprocess_exec(
            *(str(PYTHON), "-m", "tests.clients.drive_lm_eval", gateway, str(model), str(tasks)),
            *(sysconfig.get_path("purelib"), str(results)),
            cwd=REPOSITORY,
            env={**os.environ, **offline, "TOKENIZERS_PARALLELISM": "false"},
        )
        async with asyncio.timeout(550):
            assert await process.wait() == 0
    return json.loads(results.read_text(encoding="utf-8"))


# Dense weights round like those of the other backend.
LARGER = ("--max-tokens-in-paged-kv-cache", "4096", "--max-num-tokens", "256", "--weight-dtype", "dense")


def test_multiple_choice_has_the_same_log_likelihoods_and_accuracy(evaluated: Any) -> None:
    ours, theirs = evaluated["local-completions"], evaluated["hf"]
    for question, got, expected in zip(
        QUESTIONS, ours["samples"]["local_choice"], theirs["samples"]["local_choice"], strict=True
    ):
        assert len(got) == len(expected) == len(question[1])
        for (value, is_greedy), (expected_value, expected_greedy) in zip(got, expected, strict=True):
            assert value == pytest.approx(expected_value, abs=MAX_DIFFERENCE)
            assert is_greedy == expected_greedy
    assert ours["metrics"]["local_choice"] == theirs["metrics"]["local_choice"]
    assert ours["metrics"]["local_choice"]["acc,none"] > 0.5


def test_perplexity_has_the_same_log_likelihoods(evaluated: Any) -> None:
    """The `hf` backend takes the logarithms of 49,152 probabilities in float32, which is 7.5e-6 off for each token. So
    ours are compared with its sums within 1e-5 for each token, and with sums in float64 within 1e-3 in all."""
    got, expected = (evaluated[backend]["samples"]["local_text"] for backend in ("local-completions", "hf"))
    for one, other, (num_tokens, exact) in zip(got, expected, exact_sums(), strict=True):
        assert one == pytest.approx(other, abs=1e-5 * num_tokens)
        assert one == pytest.approx([exact], abs=MAX_DIFFERENCE)


def exact_sums() -> list[tuple[int, float]]:
    """The number of tokens of each text, and the sum of their log probabilities behind the token that lm-eval puts
    first."""
    network = load_reference()
    tokenizer = AutoTokenizer.from_pretrained(import_gguf(resolve_model("")))
    sums = []
    for text in texts():
        ids = tokenizer.encode(text)
        with torch.inference_mode():
            logits = network(torch.tensor([[tokenizer.bos_token_id, *ids[:-1]]])).logits[0]
        logprobs = logits.double().log_softmax(-1)
        sums.append((len(ids), float(logprobs.gather(1, torch.tensor(ids)[:, None]).sum())))
    return sums
