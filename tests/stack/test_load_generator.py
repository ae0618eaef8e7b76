"""A load generator that others wrote, unmodified, against the gateway: all succeeds, and it counts as the router."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from inflight.bench.openai_load import GUIDELLM, GuideLlmLoad, guidellm_command, run_guidellm, write_tokenizer
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from tests.contract.test_imports import REPOSITORY
from tests.stack.conftest import EXECUTOR_ARGS

PROGRAM = REPOSITORY / GUIDELLM
LOAD = GuideLlmLoad("tiny", path="/v1/completions", streams=(2,), num_requests=6, prompt_tokens=24, output_tokens=16)


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
    tokenizer, report = write_tokenizer(str(tiny_model), tmp_path / "tokenizer"), tmp_path / "report.json"
    async with LocalStack(options) as stack:
        target = f"http://{stack.gateway_addresses[0]}"
        (benchmark,) = await run_guidellm(guidellm_command(PROGRAM, LOAD, target, tokenizer, report), report)
        totals = await counted(stack.routers[0].http_address)
    metrics = benchmark["metrics"]
    assert metrics["request_totals"] == {"successful": 6, "errored": 0, "incomplete": 0, "total": 6}
    assert totals["inflight_requests_total"] == 6
    assert metrics["output_token_count"]["successful"]["total_sum"] == totals["inflight_output_tokens_total"] == 6 * 16
    assert metrics["prompt_token_count"]["successful"]["total_sum"] == totals["inflight_prompt_tokens_total"]
