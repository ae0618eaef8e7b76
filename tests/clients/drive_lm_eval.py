"""A driver that runs lm-eval, unmodified, on the same tasks with its backends `local-completions`, against a gateway,
and `hf`, and writes the results of both as one JSON object.

Runs in lm-eval's own environment (`.clients/lm-eval`), which lacks torch and transformers: those come from ours, behind
its own packages.

    python -m tests.clients.drive_lm_eval GATEWAY FOLDER SUITE PACKAGES RESULTS

FOLDER is the model's, SUITE has the tasks, PACKAGES our installed packages.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

TASKS = ("local_choice", "local_text")


def evaluate(model: str, model_args: dict[str, Any], suite: str) -> dict[str, Any]:
    """The metrics of each task, and of each of its documents the log likelihoods and whether they are greedy."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=model,
        model_args=model_args,
        tasks=list(TASKS),
        batch_size=8,
        task_manager=TaskManager(include_path=suite, include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    metrics = {
        task: {name: value for name, value in found["results"][task].items() if isinstance(value, float)}
        for task in TASKS
    }
    samples = {
        task: [sample["filtered_resps"] for sample in sorted(found["samples"][task], key=lambda one: one["doc_id"])]
        for task in TASKS
    }
    return {"metrics": metrics, "samples": samples}


def served_model(gateway: str) -> str:
    with urllib.request.urlopen(f"{gateway}/v1/models", timeout=30) as response:
        return str(json.load(response)["data"][0]["id"])


def main(gateway: str, folder: str, suite: str, packages: str, results: str) -> None:
    sys.path.append(packages)
    ours = {
        "model": served_model(gateway),
        "base_url": f"{gateway}/v1/completions",
        "tokenizer": folder,
        "tokenizer_backend": "huggingface",
        "num_concurrent": 2,
    }
    theirs = {"pretrained": folder, "dtype": "float32", "device": "cpu"}
    told = {
        "local-completions": evaluate("local-completions", ours, suite),
        "hf": evaluate("hf", theirs, suite),
    }
    Path(results).write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
