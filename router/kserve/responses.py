"""Translation of a request's events into inference responses: as they come, or one at the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from common.errors import RequestError
from inflight.kserve import grpc_service_pb2
from inflight.v1 import inference_pb2, types_pb2
from router.kserve import translation
from router.kserve.logprobs import logprob_of, logprobs_json
from router.kserve.tensors import BYTES, Element, Tensor, encode_output
from router.kserve.translation import VERSION, Wanted

FINAL_RESPONSE = "triton_final_response"

# The words that vLLM and TensorRT-LLM have for it, "None" where there is no end yet.
FINISH_REASONS = {
    types_pb2.FINISH_REASON_UNSPECIFIED: "None",
    types_pb2.FINISH_REASON_STOP_TOKEN: "stop",
    types_pb2.FINISH_REASON_STOP_STRING: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_CANCELLED: "cancelled",
    types_pb2.FINISH_REASON_DEADLINE: "timeout",
}

Send = Callable[[grpc_service_pb2.ModelInferResponse], Awaitable[None]]


class Responder:
    """Answers one request. Its `write` is told the events, `send` gets the responses."""

    def __init__(self, wanted: Wanted, send: Send) -> None:
        self._wanted = wanted
        self._send = send
        self._num_prompt_tokens = 0
        self._reason = types_pb2.FINISH_REASON_UNSPECIFIED
        # What no response has carried yet.
        self._text = wanted.prompt
        self._token_ids: list[int] = []
        self._num_tokens = 0
        self._logprobs: list[types_pb2.PositionLogprobs] = []
        # Of all that any response has carried.
        self._cumulative_logprob = 0.0

    async def write(self, event: inference_pb2.StreamEvent) -> None:
        """Takes the next event of the request."""
        match event.WhichOneof("event"):
            case "accepted":
                self._num_prompt_tokens = event.accepted.prompt_tokens
            case "delta":
                self._text += event.delta.text.encode()
                self._token_ids += event.delta.token_ids
                self._num_tokens += event.delta.num_tokens
                self._logprobs += event.delta.logprobs
                self._cumulative_logprob += sum(map(logprob_of, event.delta.logprobs))
                if self._wanted.is_streamed:
                    await self._respond(is_final=False)
            case "finished":
                self._reason = event.finished.reason
            case "done":
                await self._respond(is_final=True)

    async def _respond(self, *, is_final: bool) -> None:
        response = begun(self._wanted)
        for tensor in self._tensors(is_final):
            encode_output(response, tensor)
        response.parameters[FINAL_RESPONSE].bool_param = is_final
        if is_final:
            response.parameters[translation.FINISH_REASON].string_param = FINISH_REASONS[self._reason]
        self._text, self._token_ids, self._num_tokens, self._logprobs = b"", [], 0, []
        await self._send(response)

    def _tensors(self, is_final: bool) -> list[Tensor]:
        wanted = self._wanted.outputs
        if is_final and self._wanted.is_streamed and self._wanted.may_end_empty and not self._text:
            # All has been said but how it ended.
            wanted = wanted & {translation.FINISH_REASON}
        ids, reason = self._token_ids, FINISH_REASONS[self._reason]
        tensors = [
            _tensor(translation.TEXT_OUTPUT, BYTES, self._text),
            Tensor(translation.OUTPUT_IDS, "INT32", (1, 1, len(ids)), tuple(ids)),
            Tensor(translation.SEQUENCE_LENGTH, "INT32", (1, 1), (self._num_tokens,)),
            _tensor(translation.FINISH_REASON, BYTES, reason.encode()),
            _tensor(translation.NUM_INPUT_TOKENS, "UINT32", self._num_prompt_tokens),
            _tensor(translation.NUM_OUTPUT_TOKENS, "UINT32", self._num_tokens),
        ]
        if not wanted.isdisjoint(translation.OUTPUTS_OF_LOGPROBS):
            tensors += self._logprob_tensors()
        return [tensor for tensor in tensors if tensor.name in wanted]

    def _logprob_tensors(self) -> tuple[Tensor, ...]:
        values, total = tuple(map(logprob_of, self._logprobs)), self._cumulative_logprob
        return (
            Tensor(translation.OUTPUT_LOG_PROBS, "FP32", (1, 1, len(values)), values),
            Tensor(translation.CUM_LOG_PROBS, "FP32", (1, 1), (total,)),
            _tensor(translation.LOGPROBS, BYTES, logprobs_json(self._logprobs)),
            _tensor(translation.CUMULATIVE_LOGPROB, "FP32", total),
        )


def begun(wanted: Wanted) -> grpc_service_pb2.ModelInferResponse:
    """A response that says so far whose it is."""
    return grpc_service_pb2.ModelInferResponse(
        model_name=wanted.model_name, model_version=VERSION, id=wanted.request_id
    )


def error_response(
    request: grpc_service_pb2.ModelInferRequest, error: RequestError
) -> grpc_service_pb2.ModelStreamInferResponse:
    """The end of one request of a stream that goes on. What a status would carry is in parameters."""
    response = grpc_service_pb2.ModelInferResponse(model_name=request.model_name, model_version=VERSION, id=request.id)
    response.parameters[FINAL_RESPONSE].bool_param = True
    response.parameters["grpc_status"].string_param = error.code.name
    response.parameters["reason"].string_param = error.reason.value
    if error.retry_after_ms is not None:
        response.parameters["retry_after_ms"].int64_param = error.retry_after_ms
    return grpc_service_pb2.ModelStreamInferResponse(error_message=error.description, infer_response=response)


def _tensor(name: str, datatype: str, element: Element) -> Tensor:
    return Tensor(name, datatype, (1,), (element,))
