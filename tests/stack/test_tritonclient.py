"""The real tritonclient, unmodified and in its own environment, against real processes: one run of every scenario of
`tests/clients/drive_tritonclient.py`, and a test for each that looks at what it saw."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from tests.clients.environments import REPOSITORY, python_of

MODEL = "tiny"
EXECUTOR_ARGS = (
    *("--dtype", "float32"),
    *("--max-tokens-in-paged-kv-cache", "4096"),
    *("--max-num-sequences", "8"),
    *("--num-threads", "1"),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seen(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Any]]:
    """What the client saw, by scenario."""
    python = python_of("tritonclient")
    options = StackOptions(
        model=str(tiny_model), executor_args=EXECUTOR_ARGS, run_dir=tmp_path_factory.mktemp("kserve")
    )
    async with LocalStack(options) as stack:
        process = await asyncio.create_subprocess_exec(
            *(python, "-m", "tests.clients.drive_tritonclient", stack.address, MODEL),
            stdout=asyncio.subprocess.PIPE,
            cwd=REPOSITORY,
        )
        async with asyncio.timeout(500):
            printed, _ = await process.communicate()
        yield json.loads(printed)


@pytest.fixture
def scenario(request: pytest.FixtureRequest, seen: dict[str, Any]) -> Any:
    """What the scenario that the test is named for saw."""
    result = seen[request.function.__name__.removeprefix("test_")]
    assert "failed" not in result, result["failed"]
    return result


def text_of(responses: list[dict[str, Any]], request_id: str) -> str:
    of_request = (response for response in responses if response["id"] == request_id)
    return "".join(response["tensors"].get("text_output", [""])[0] for response in of_request)


def test_health(scenario: Any) -> None:
    live, ready, model_ready, unknown_model_ready, unknown_version_ready = scenario
    assert live
    assert ready
    assert model_ready
    assert not unknown_model_ready
    assert not unknown_version_ready


def test_metadata(scenario: Any) -> None:
    assert scenario["server"]["name"] == "inflight"
    assert scenario["model"]["name"] == MODEL
    inputs = {tensor["name"]: tensor["datatype"] for tensor in scenario["model"]["inputs"]}
    assert inputs["text_input"] == inputs["sampling_parameters"] == "BYTES"
    assert {"max_tokens", "runtime_top_p", "sampling_param_seed"} <= inputs.keys()
    config = scenario["config"]["config"]
    assert config["model_transaction_policy"]["decoupled"]
    assert {tensor["name"] for tensor in config["input"]} == inputs.keys()
    assert scenario["index"]["models"] == [{"name": MODEL, "version": "1", "state": "READY"}]
    assert scenario["unknown"]["status"] == "StatusCode.NOT_FOUND"
    assert scenario["unserved"]["status"] == "StatusCode.UNIMPLEMENTED"


def test_infer(scenario: Any) -> None:
    assert scenario["id"] == "whole"
    tensors = scenario["tensors"]
    assert tensors["finish_reason"] == ["length"]
    assert tensors["num_input_tokens"] == [len("Once upon a time")]  # the tiny model reads bytes
    assert tensors["num_output_tokens"] == [12]


def test_infer_like_tensorrt_llm(scenario: Any, seen: dict[str, Any]) -> None:
    assert scenario["tensors"] == {"text_output": seen["infer"]["tensors"]["text_output"]}


def test_infer_by_ids(scenario: Any) -> None:
    ((ids,),) = scenario["tensors"]["output_ids"]
    assert len(ids) == 4
    assert scenario["tensors"]["sequence_length"] == [[4]]


def test_log_probabilities(scenario: Any) -> None:
    tensorrt_llm, vllm = scenario["tensorrt_llm"]["tensors"], scenario["vllm"]["tensors"]
    (((values),),) = tensorrt_llm["output_log_probs"]
    assert len(values) == 6
    assert all(value <= 0 for value in values)
    assert tensorrt_llm["cum_log_probs"] == [[pytest.approx(sum(values), rel=1e-5)]]
    positions = json.loads(vllm["logprobs"][0])
    assert [len(position) for position in positions] == [2] * 6
    # Greedy: the likeliest token is the one produced.
    likeliest = [max(position.values(), key=lambda one: one["logprob"]) for position in positions]
    assert [one["logprob"] for one in likeliest] == pytest.approx(values, rel=1e-4)
    assert [one["rank"] for one in likeliest] == [1] * 6
    assert vllm["cumulative_logprob"] == [pytest.approx(sum(values), rel=1e-4)]
    pieces = [one["tensors"] for one in scenario["streamed"] if one["tensors"]]
    streamed = [position for piece in pieces for position in json.loads(piece["logprobs"][0])]
    assert [list(position) for position in streamed] == [list(position) for position in positions]
    assert pieces[-1]["cumulative_logprob"] == [pytest.approx(sum(values), rel=1e-4)]


def test_refusals(scenario: Any) -> None:
    assert {name: refused["status"] for name, refused in scenario.items()} == {
        "unknown": "StatusCode.INVALID_ARGUMENT",
        "beams": "StatusCode.UNIMPLEMENTED",
        "logits": "StatusCode.UNIMPLEMENTED",
        "penalty": "StatusCode.INVALID_ARGUMENT",
        "top_p": "StatusCode.INVALID_ARGUMENT",
        "streamed": "StatusCode.UNIMPLEMENTED",
        "batch": "StatusCode.INVALID_ARGUMENT",
        "model": "StatusCode.NOT_FOUND",
        "parameter": "StatusCode.INVALID_ARGUMENT",
        "sequence": "StatusCode.INVALID_ARGUMENT",
    }
    assert "inputs[lora_task_id]" in scenario["unknown"]["text"]
    assert "inputs[repetition_penalty]: is -1; must be a number above 0" in scenario["penalty"]["text"]
    assert "inputs[runtime_top_p]: is 2" in scenario["top_p"]["text"]
    assert "doesn't support models with decoupled transaction policy" in scenario["streamed"]["text"]
    assert scenario["model"]["text"] == "model_name: there is no model 'unknown'; known: tiny"


def test_interleaved(scenario: Any) -> None:
    streamed = scenario["streamed"]
    assert [text_of(streamed, str(i)) for i in range(3)] == [
        alone["tensors"]["text_output"][0] for alone in scenario["alone"]
    ]
    ends = {
        response["id"]: number
        for number, response in enumerate(streamed)
        if response["parameters"]["triton_final_response"]
    }
    assert ends.keys() == {"0", "1", "2"}
    assert all(not streamed[number]["tensors"] for number in ends.values())


def test_without_empty_final_response(scenario: Any) -> None:
    streamed = [response for response in scenario if response["id"] == "plain"]
    assert [one["tensors"]["finish_reason"] for one in streamed] == [["None"]] * (len(streamed) - 1) + [["length"]]
    (whole,) = [response for response in scenario if response["id"] == "whole"]
    assert whole["tensors"]["text_output"] == [text_of(scenario, "plain")]
    assert whole["parameters"]["triton_final_response"]


def test_refused_on_a_stream(scenario: Any) -> None:
    assert scenario["refused"]["error"] == "inputs[sampling_parameters].colour: there is no such parameter"
    assert scenario["refused"]["status"] is None
    assert text_of(scenario["served"], "right")


def test_refused_with_a_status(scenario: Any) -> None:
    assert scenario["status"] == "StatusCode.NOT_FOUND"


def test_cancelled(scenario: Any) -> None:
    assert scenario["first"]["id"] == "long"
    assert scenario["last"]["status"] == "StatusCode.CANCELLED"


def test_cancelled_call(scenario: Any) -> None:
    assert scenario == "StatusCode.CANCELLED"


def test_timed_out(scenario: Any) -> None:
    assert scenario["parameters"]["finish_reason"] == "timeout"


def test_asynchronously(scenario: Any, seen: dict[str, Any]) -> None:
    alone = [one["tensors"]["text_output"][0] for one in seen["interleaved"]["alone"]]
    assert [text_of(scenario["streamed"], str(i)) for i in range(3)] == alone
    assert scenario["whole"]["tensors"]["text_output"] == [alone[0]]
    assert scenario["first"]["id"] == "endless"
    assert scenario["cancelled"]
    assert scenario["ready"] == [True, True]
