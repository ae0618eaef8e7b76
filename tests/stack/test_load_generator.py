"""A load generator that others wrote, unmodified, against the gateway: all succeeds, and it counts as the router."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx2
import pytest

from inflight.common.model_source import load_tokenizer, resolve_model
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from tests.contract.test_imports import REPOSITORY
from tests.stack.conftest import EXECUTOR_ARGS

PROGRAM = REPOSITORY / ".clients/guidellm/bin/guidellm"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


async def run_guidellm(target: str, tokenizer: Path, report: Path) -> None:
    """Sends six requests, two at a time, and writes GuideLLM's report of them."""
    command = [
        *(str(PROGRAM), "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={target},model=tiny,request_format=/v1/completions"),
        *("--profile", json.dumps({"kind": "concurrent", "streams": [2]})),
        *("--constraint", "kind=max_requests,count=6"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
        *("--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=16"),
        *("--output", f"kind=json,path={report}"),
    ]
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, **OFFLINE}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode(errors="replace")[-2000:]


def figures_of(report: Path) -> dict[str, Any]:
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    return dict(benchmark["metrics"])


async def counted(address: str) -> dict[str, float]:
    """Every sample of a router, added up over its labels."""
    async with httpx2.AsyncClient(timeout=60) as http:
        page = (await http.get(f"http://{address}/metrics")).text
    totals: dict[str, float] = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            name = line.partition("{")[0].partition(" ")[0]
            totals[name] = totals.get(name, 0.0) + float(line.rpartition(" ")[2])
    return totals


@pytest.mark.skipif(not PROGRAM.exists(), reason="GuideLLM is not installed; make loadgen does that")
async def test_guidellm_has_every_request_answered_and_counts_the_same_tokens(tmp_path: Path, tiny_model: Path) -> None:
    options = StackOptions(
        model=str(tiny_model), gateways=1, executor_args=EXECUTOR_ARGS, run_dir=tmp_path / "run"
    )  # fmt: skip
    load_tokenizer(resolve_model(str(tiny_model))).save_pretrained(str(tmp_path / "tokenizer"))
    async with LocalStack(options) as stack:
        target = f"http://{stack.gateway_addresses[0]}"
        await run_guidellm(target, tmp_path / "tokenizer", tmp_path / "report.json")
        totals = await counted(stack.routers[0].http_address)
    metrics = figures_of(tmp_path / "report.json")
    assert metrics["request_totals"] == {"successful": 6, "errored": 0, "incomplete": 0, "total": 6}
    assert totals["inflight_requests_total"] == 6
    assert metrics["output_token_count"]["successful"]["total_sum"] == totals["inflight_output_tokens_total"] == 6 * 16
    assert metrics["prompt_token_count"]["successful"]["total_sum"] == totals["inflight_prompt_tokens_total"]
