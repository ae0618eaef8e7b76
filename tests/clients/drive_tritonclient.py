"""A driver that calls a router with the real tritonclient, unmodified, and prints the results as one JSON object.

Runs in tritonclient's own environment (`.clients/tritonclient`), never in ours. Each scenario is a function whose
result a test looks at; one that fails is reported as its traceback.

    python -m tests.clients.drive_tritonclient ADDRESS MODEL
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tritonclient.grpc as blocking
import tritonclient.grpc.aio as asynchronous
from tritonclient.utils import InferenceServerException

TIMEOUT_S = 60
PROMPTS = ("Once upon a time", "The bus stops", "In flight")
GREEDY = {"temperature": 0, "ignore_eos": True}


def tensor(name: str, values: Any, datatype: str, grpcclient: Any = blocking) -> Any:
    """An input as clients make it: BYTES of text, or numbers."""
    kinds: dict[str, Any] = {"BYTES": object, "BOOL": bool, "INT32": "i4", "FP32": "f4", "UINT64": "u8"}
    array: Any = np.array(values, dtype=kinds[datatype])
    made = grpcclient.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def text_inputs(prompt: str, max_tokens: int, *, stream: bool, grpcclient: Any = blocking, **more: Any) -> list[Any]:
    """A request as vLLM's clients make it."""
    sampling = json.dumps({**GREEDY, "max_tokens": max_tokens, **more}).encode()
    return [
        tensor("text_input", [prompt.encode()], "BYTES", grpcclient),
        tensor("stream", [stream], "BOOL", grpcclient),
        tensor("sampling_parameters", [sampling], "BYTES", grpcclient),
    ]


def refusal(call: Callable[[], Any]) -> dict[str, Any]:
    """The exception that a call ends with."""
    try:
        call()
    except InferenceServerException as error:
        return {"status": error.status(), "text": error.message()}
    return {"status": "OK", "text": ""}


def response(result: Any) -> dict[str, Any]:
    """What a response says, as a program would read it."""
    said = result.get_response()
    tensors = {output.name: result.as_numpy(output.name).tolist() for output in said.outputs}
    for name, elements in tensors.items():
        tensors[name] = [one.decode() if isinstance(one, bytes) else one for one in elements]
    parameters = {key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in said.parameters.items()}
    return {"id": said.id, "model": said.model_name, "tensors": tensors, "parameters": parameters}


class Stream:
    """A stream of the blocking client: sends, and takes what comes."""

    def __init__(self, client: Any, **options: Any) -> None:
        self._client = client
        self._came: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(callback=lambda result, error: self._came.put((result, error)), **options)

    def send(self, inputs: list[Any], model: str, request_id: str = "", **options: Any) -> None:
        """Sends a request that says when it has ended."""
        options.setdefault("enable_empty_final_response", True)
        self._client.async_stream_infer(model, inputs, request_id=request_id, **options)

    def take(self) -> dict[str, Any]:
        """What comes next."""
        result, error = self._came.get(timeout=TIMEOUT_S)
        if error is not None:
            return {"error": error.message(), "status": error.status()}
        return response(result)

    def take_until_ended(self, num_requests: int) -> list[dict[str, Any]]:
        """All responses until so many requests have ended."""
        taken = []
        while num_requests:
            taken.append(self.take())
            num_requests -= "error" in taken[-1] or taken[-1]["parameters"]["triton_final_response"]
        return taken


def health(client: Any, model: str) -> Any:
    return [
        client.is_server_live(),
        client.is_server_ready(),
        client.is_model_ready(model),
        client.is_model_ready("unknown"),
        client.is_model_ready(model, "2"),
    ]


def metadata(client: Any, model: str) -> Any:
    return {
        "server": client.get_server_metadata(as_json=True),
        "model": client.get_model_metadata(model, as_json=True),
        "config": client.get_model_config(model, as_json=True),
        "index": client.get_model_repository_index(as_json=True),
        "unknown": refusal(lambda: client.get_model_metadata("unknown")),
        "unserved": refusal(client.get_inference_statistics),
    }


def infer(client: Any, model: str) -> Any:
    wanted = [tensor(f"return_{name}", [True], "BOOL") for name in ("finish_reason", "num_input_tokens")]
    wanted.append(tensor("return_num_output_tokens", [True], "BOOL"))
    return response(client.infer(model, [*text_inputs(PROMPTS[0], 12, stream=False), *wanted], request_id="whole"))


def infer_like_tensorrt_llm(client: Any, model: str) -> Any:
    """Shapes with a batch dimension, one tensor for each option."""
    inputs = [
        tensor("text_input", [[PROMPTS[0].encode()]], "BYTES"),
        tensor("max_tokens", [[12]], "INT32"),
        tensor("temperature", [[0.0]], "FP32"),
        tensor("end_id", [[-1]], "INT32"),
        tensor("pad_id", [[0]], "INT32"),
        tensor("beam_width", [[1]], "INT32"),
        tensor("random_seed", [[7]], "UINT64"),
        tensor("bad_words", [[b""]], "BYTES"),
        tensor("stop_words", [[b""]], "BYTES"),
    ]
    return response(client.infer(model, inputs, outputs=[blocking.InferRequestedOutput("text_output")]))


def infer_by_ids(client: Any, model: str) -> Any:
    inputs = [
        tensor("input_ids", [[5, 6, 7, 0, 0]], "INT32"),
        tensor("input_lengths", [[3]], "INT32"),
        tensor("request_output_len", [[4]], "INT32"),
        tensor("end_id", [[-1]], "INT32"),
        tensor("temperature", [[0.0]], "FP32"),
    ]
    return response(client.infer(model, inputs))


def refusals(client: Any, model: str) -> Any:
    prompt = tensor("text_input", [b"hello"], "BYTES")
    tensors = {
        "unknown": tensor("lora_task_id", [1], "UINT64"),
        "beams": tensor("beam_width", [4], "INT32"),
        "logits": tensor("return_context_logits", [True], "BOOL"),
        "penalty": tensor("repetition_penalty", [-1.0], "FP32"),
        "top_p": tensor("runtime_top_p", [2.0], "FP32"),
        "streamed": tensor("stream", [True], "BOOL"),
        "batch": tensor("max_tokens", [1, 2], "INT32"),
    }
    refused = {name: refusal(partial(client.infer, model, [prompt, one])) for name, one in tensors.items()}
    refused["model"] = refusal(lambda: client.infer("unknown", [prompt]))
    refused["parameter"] = refusal(lambda: client.infer(model, [prompt], parameters={"colour": "blue"}))
    refused["sequence"] = refusal(lambda: client.infer(model, [prompt], sequence_id=3))
    return refused


def log_probabilities(client: Any, model: str) -> Any:
    """As TensorRT-LLM's clients ask for them, as vLLM's do, and vLLM's in pieces."""
    names = ("return_logprobs", "return_cumulative_logprob", "return_num_output_tokens")
    flags = [tensor(name, [True], "BOOL") for name in names]
    stream = Stream(client)
    stream.send([*text_inputs(PROMPTS[0], 6, stream=True, logprobs=2), *flags], model, "pieces")
    taken = stream.take_until_ended(1)
    client.stop_stream()
    inputs = [*text_inputs(PROMPTS[0], 6, stream=False), tensor("return_log_probs", [[True]], "BOOL")]
    return {
        "tensorrt_llm": response(client.infer(model, inputs)),
        "vllm": response(client.infer(model, [*text_inputs(PROMPTS[0], 6, stream=False, logprobs=2), *flags])),
        "streamed": taken,
    }


def interleaved(client: Any, model: str) -> Any:
    """Several requests on one stream, and each on its own for comparison."""
    stream = Stream(client)
    for number, prompt in enumerate(PROMPTS):
        stream.send(text_inputs(prompt, 24, stream=True), model, str(number))
    taken = stream.take_until_ended(len(PROMPTS))
    client.stop_stream()
    alone = [response(client.infer(model, text_inputs(prompt, 24, stream=False))) for prompt in PROMPTS]
    return {"streamed": taken, "alone": alone}


def without_empty_final_response(client: Any, model: str) -> Any:
    stream = Stream(client)
    inputs = [*text_inputs(PROMPTS[0], 3, stream=True), tensor("return_finish_reason", [True], "BOOL")]
    stream.send(inputs, model, "plain", enable_empty_final_response=False)
    stream.send(text_inputs(PROMPTS[0], 3, stream=False), model, "whole", enable_empty_final_response=False)
    taken = stream.take_until_ended(2)
    client.stop_stream()
    return taken


def refused_on_a_stream(client: Any, model: str) -> Any:
    """A refusal is a message, and the stream goes on."""
    stream = Stream(client)
    stream.send(text_inputs(PROMPTS[0], 3, stream=True, colour="blue"), model, "wrong")
    refused = stream.take()
    stream.send(text_inputs(PROMPTS[0], 3, stream=True), model, "right")
    served = stream.take_until_ended(1)
    client.stop_stream()
    return {"refused": refused, "served": served}


def refused_with_a_status(client: Any, model: str) -> Any:
    stream = Stream(client, headers={"triton_grpc_error": "true"})
    stream.send(text_inputs(PROMPTS[0], 3, stream=True), "unknown", "wrong")
    refused = stream.take()
    client.stop_stream(cancel_requests=True)
    return refused


def cancelled(client: Any, model: str) -> Any:
    """The stream is cancelled in the middle of an output."""
    stream = Stream(client)
    stream.send(text_inputs(PROMPTS[0], 900, stream=True), model, "long")
    first = stream.take()
    client.stop_stream(cancel_requests=True)
    while "status" not in (last := stream.take()):
        pass
    return {"first": first, "last": last}


def cancelled_call(client: Any, model: str) -> Any:
    came: queue.Queue[Any] = queue.Queue()
    call = client.async_infer(
        model, text_inputs(PROMPTS[0], 900, stream=False), callback=lambda result, error: came.put(error)
    )
    call.cancel()
    return came.get(timeout=TIMEOUT_S).status()


def timed_out(client: Any, model: str) -> Any:
    """Triton's timeout, in microseconds, ends a request."""
    return response(client.infer(model, text_inputs(PROMPTS[0], 900, stream=False), timeout=100_000))


def asynchronously(address: str, model: str) -> Any:
    """The same by grpc.aio."""

    async def run() -> Any:
        async with asynchronous.InferenceServerClient(address) as client:

            async def requests() -> Any:
                for number, prompt in enumerate(PROMPTS):
                    inputs = text_inputs(prompt, 24, stream=True, grpcclient=asynchronous)
                    yield {
                        "model_name": model,
                        "inputs": inputs,
                        "request_id": str(number),
                        "parameters": {"max_tokens": 24, "temperature": "0"},
                    }

            streamed = [
                {"error": error.message()} if error else response(result)
                async for result, error in client.stream_infer(requests())
            ]
            inputs = text_inputs(PROMPTS[0], 24, stream=False, grpcclient=asynchronous)
            whole = response(await client.infer(model, inputs))
            endless = text_inputs(PROMPTS[0], 900, stream=True, grpcclient=asynchronous)

            async def one() -> Any:
                yield {"model_name": model, "inputs": endless, "request_id": "endless"}

            iterator = client.stream_infer(one())
            first = response((await anext(iterator))[0])
            ready = [await client.is_server_live(), await client.is_model_ready(model)]
            return {
                "streamed": streamed,
                "whole": whole,
                "first": first,
                "cancelled": iterator.cancel(),
                "ready": ready,
            }

    return asyncio.run(run())


SCENARIOS = (
    *(health, metadata, infer, infer_like_tensorrt_llm, infer_by_ids, log_probabilities, refusals, interleaved),
    *(without_empty_final_response, refused_on_a_stream, refused_with_a_status, cancelled, cancelled_call, timed_out),
)


def main() -> int:
    """Runs every scenario and prints the results."""
    address, model = sys.argv[1:]
    seen: dict[str, Any] = {}
    with blocking.InferenceServerClient(address) as client:
        for scenario in SCENARIOS:
            try:
                seen[scenario.__name__] = scenario(client, model)
            except Exception:  # a test shows it
                seen[scenario.__name__] = {"failed": traceback.format_exc()}
    try:
        seen[asynchronously.__name__] = asynchronously(address, model)
    except Exception:  # a test shows it
        seen[asynchronously.__name__] = {"failed": traceback.format_exc()}
    print(json.dumps(seen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
