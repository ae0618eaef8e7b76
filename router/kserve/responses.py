"""Translation of a request's events into inference responses: as they come, or one at the end. Log
probabilities are the tensors of TensorRT-LLM's and vLLM's backends."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.common.errors import RequestError
from inflight.kserve import grpc_service_pb2
from inflight.router.kserve import translation
from inflight.router.kserve.tensors import BYTES, Element, Tensor, encode_output
from inflight.router.kserve.translation import VERSION, Wanted
from inflight.v1 import inference_pb2, types_pb2

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


@dataclass(slots=True)
class OutputRow:
    """What no response has carried yet of a choice; the sum of its log probabilities is of all that any has carried."""

    text: bytes
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    logprobs: list[types_pb2.PositionLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    reason: types_pb2.FinishReason = types_pb2.FINISH_REASON_UNSPECIFIED

    def take(self, delta: inference_pb2.Delta) -> None:
        """Adds more output."""
        self.text += delta.text.encode()
        self.token_ids += delta.token_ids
        self.num_tokens += delta.num_tokens
        self.logprobs += delta.logprobs
        self.cumulative_logprob += sum(map(logprob_of, delta.logprobs))

    def forget(self) -> None:
        """Forgets what a response has carried."""
        self.text, self.token_ids, self.num_tokens, self.logprobs = b"", [], 0, []


class Responder:
    """Answers one request. Its `write` is told the events, `send` gets the responses. Each response has a row for each
    choice, as with vLLM's and TensorRT-LLM's backends."""

    def __init__(self, wanted: Wanted, send: Send) -> None:
        self._wanted = wanted
        self._send = send
        self._num_prompt_tokens = 0
        self._rows = [OutputRow(wanted.prompt) for _ in range(wanted.num_choices)]

    async def write(self, event: inference_pb2.StreamEvent) -> None:
        """Takes the next event of the request."""
        match event.WhichOneof("event"):
            case "accepted":
                self._num_prompt_tokens = event.accepted.prompt_tokens
            case "delta":
                self._rows[event.delta.choice].take(event.delta)
                if self._wanted.is_streamed:
                    await self._respond(is_final=False)
            case "finished":
                self._rows[event.finished.choice].reason = _shown_reason(event.finished)
            case "done":
                await self._respond(is_final=True)

    async def _respond(self, *, is_final: bool) -> None:
        response = begun(self._wanted)
        for tensor in self._tensors(is_final):
            encode_output(response, tensor)
        response.parameters[FINAL_RESPONSE].bool_param = is_final
        if is_final:
            reasons = ",".join(FINISH_REASONS[row.reason] for row in self._rows)
            response.parameters[translation.FINISH_REASON].string_param = reasons
        for row in self._rows:
            row.forget()
        await self._send(response)

    def _tensors(self, is_final: bool) -> list[Tensor]:
        wanted, rows = self._wanted.outputs, self._rows
        if is_final and self._wanted.is_streamed and self._wanted.may_end_empty and not any(row.text for row in rows):
            # All has been said but how it ended.
            wanted = wanted & {translation.FINISH_REASON}
        tensors = [
            _tensor(translation.TEXT_OUTPUT, BYTES, [row.text for row in rows]),
            _matrix(translation.OUTPUT_IDS, "INT32", [row.token_ids for row in rows], 0),
            Tensor(translation.SEQUENCE_LENGTH, "INT32", (1, len(rows)), tuple(row.num_tokens for row in rows)),
            _tensor(translation.FINISH_REASON, BYTES, [FINISH_REASONS[row.reason].encode() for row in rows]),
            _tensor(translation.NUM_INPUT_TOKENS, "UINT32", [self._num_prompt_tokens]),
            _tensor(translation.NUM_OUTPUT_TOKENS, "UINT32", [row.num_tokens for row in rows]),
        ]
        if not wanted.isdisjoint(translation.OUTPUTS_OF_LOGPROBS):
            tensors += self._logprob_tensors()
        return [tensor for tensor in tensors if tensor.name in wanted]

    def _logprob_tensors(self) -> tuple[Tensor, ...]:
        rows = self._rows
        values, totals = [list(map(logprob_of, row.logprobs)) for row in rows], [row.cumulative_logprob for row in rows]
        return (
            _matrix(translation.OUTPUT_LOG_PROBS, "FP32", values, 0.0),
            Tensor(translation.CUM_LOG_PROBS, "FP32", (1, len(rows)), tuple(totals)),
            _tensor(translation.LOGPROBS, BYTES, [logprobs_json(row.logprobs) for row in rows]),
            _tensor(translation.CUMULATIVE_LOGPROB, "FP32", totals),
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


def _tensor(name: str, datatype: str, elements: Sequence[Element]) -> Tensor:
    return Tensor(name, datatype, (len(elements),), tuple(elements))


def _matrix(name: str, datatype: str, rows: Sequence[Sequence[Element]], padding: Element) -> Tensor:
    """Returns a tensor of shape [1, choices, longest row]; shorter rows are padded."""
    longest = max(map(len, rows))
    padded = tuple(element for row in rows for element in (*row, *(padding,) * (longest - len(row))))
    return Tensor(name, datatype, (1, len(rows), longest), padded)


def _shown_reason(finished: inference_pb2.Finished) -> types_pb2.FinishReason:
    """Returns the reason that a response names. Output that a stop cut off within its form is not complete."""
    is_stop = finished.reason in (types_pb2.FINISH_REASON_STOP_TOKEN, types_pb2.FINISH_REASON_STOP_STRING)
    return types_pb2.FINISH_REASON_LENGTH if is_stop and finished.constraint_unfinished else finished.reason


# JSON has no infinity; this is OpenAI's and vLLM's word for it.
VERY_UNLIKELY = -9999.0


def logprob_of(position: types_pb2.PositionLogprobs) -> float:
    """That of the token produced; not a number where it is not known any more."""
    return position.chosen.logprob if position.HasField("chosen") else math.nan


def logprobs_json(positions: Iterable[types_pb2.PositionLogprobs]) -> bytes:
    """vLLM's text: an object for each position, its keys token ids; null where nothing is known any more."""
    return json.dumps([_by_token_id(position) for position in positions]).encode()


def _by_token_id(position: types_pb2.PositionLogprobs) -> dict[str, dict[str, Any]] | None:
    if not position.HasField("chosen"):
        return None
    told = {str(token.token_id): _told(token, rank) for rank, token in enumerate(position.top, start=1)}
    # An executor of an earlier version does not report the rank of a token that is not among these.
    told.setdefault(str(position.chosen.token_id), _told(position.chosen, position.chosen.rank or None))
    return told


def _told(token: types_pb2.TokenLogprob, rank: int | None) -> dict[str, Any]:
    return {
        "logprob": max(VERY_UNLIKELY, token.logprob),
        "rank": rank,
        "decoded_token": token.text_bytes.decode(errors="replace"),
    }
