"""`Embed`: embeddings or scores of many inputs.

Each input is a request of its own, from its preparation to its end, and passes the same way as one that generates: the
ledger's queue, a placement, an executor. It yields no token; the end carries its result. All inputs are prepared before
the first is submitted, so that an invalid one costs nothing. A failed input ends the call and cancels the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from inflight.common.errors import FieldViolation, Reason, RequestError, invalid
from inflight.router.dispatch.pools import ModelPool
from inflight.router.stream.request_stream import RequestStream
from inflight.router.text.pairs import pair_chat
from inflight.v1 import inference_pb2, types_pb2

MAX_INPUTS = 2048
# Of all results of a call: 24 MiB. Clients receive messages of 32 MiB.
MAX_NUMBERS = 6 * 2**20
# Inputs of a call that wait or run at once. They are few beside the bounds of a queue, and enough to fill steps.
MAX_AT_ONCE = 64

Opened = Callable[[], RequestStream]


def pooling_of(pool: ModelPool) -> types_pb2.Pooling:
    """Returns what a model makes of a prompt. Raises `RequestError` if it makes nothing, or has no executor."""
    description = pool.describe()
    if not description.HasField("pooling"):
        text = (
            f"{pool.name!r} makes no embeddings or scores; name an embedding model, or start the executors of this one "
            "with --pooling last, mean or yes_no"
        )
        raise invalid(FieldViolation("model", text))
    return description.pooling


def check_embed(request: inference_pb2.EmbedRequest, pooling: types_pb2.Pooling) -> None:
    """Raises `RequestError` for what no input can have."""
    violations = tuple(_violations(request, pooling))
    if violations:
        raise invalid(*violations)


def _violations(request: inference_pb2.EmbedRequest, pooling: types_pb2.Pooling) -> Iterator[FieldViolation]:
    is_score = pooling.kind == types_pb2.POOLING_KIND_SCORE
    if not 1 <= len(request.inputs) <= MAX_INPUTS:
        yield FieldViolation("inputs", f"has {len(request.inputs)} inputs; must have 1 to {MAX_INPUTS}")
    if request.dimensions and is_score:
        yield FieldViolation("dimensions", "is for embeddings, and this model makes scores")
    elif request.dimensions > pooling.size:
        yield FieldViolation("dimensions", f"is {request.dimensions}; embeddings of this model have {pooling.size}")
    num_numbers = len(request.inputs) * (request.dimensions or pooling.size)
    if num_numbers > MAX_NUMBERS:
        text = f"make {num_numbers} numbers, and a response has at most {MAX_NUMBERS}; send fewer at once"
        yield FieldViolation("inputs", text)
    for i, one in enumerate(request.inputs[:MAX_INPUTS]):
        if one.HasField("pair") and not is_score:
            yield FieldViolation(f"inputs[{i}].pair", "is for models that score, and this one makes embeddings")
            return


def requests_of(
    request: inference_pb2.EmbedRequest, base: inference_pb2.GenerateRequest, pool: ModelPool
) -> list[inference_pb2.GenerateRequest]:
    """Returns each input as a request for what is the same for all, `base`, whose caller may send it."""
    requests = []
    for i, one in enumerate(request.inputs):
        asked = inference_pb2.GenerateRequest()
        asked.CopyFrom(base)
        match one.WhichOneof("input"):
            case "text":
                asked.text = one.text
            case "token_ids":
                asked.token_ids.CopyFrom(one.token_ids)
            case "pair":
                if not pool.text.has_chat_template:
                    text = "the model has no chat template; send the text that it was trained with"
                    raise invalid(FieldViolation(f"inputs[{i}].pair", text))
                asked.chat.CopyFrom(pair_chat(one.pair, pool.text.roles))
            case _:
                raise invalid(
                    FieldViolation(f"inputs[{i}]", "is empty; exactly one of text, token_ids, pair is needed")
                )
        requests.append(asked)
    return requests


def base_request(request: inference_pb2.EmbedRequest) -> inference_pb2.GenerateRequest:
    """Returns what is the same for all inputs."""
    base = inference_pb2.GenerateRequest(
        model=request.model,
        tenant=request.tenant,
        priority=request.priority,
        sampling=types_pb2.SamplingParams(seed=0),
    )
    if request.HasField("cache"):
        base.cache.CopyFrom(request.cache)
    if request.HasField("deadline"):
        base.deadlines.total.CopyFrom(request.deadline)
    return base


def of_input(error: RequestError, index: int) -> RequestError:
    """Returns an error that names the input in its fields."""
    if error.reason is not Reason.INVALID_FIELD:
        return error
    return invalid(
        *(
            FieldViolation(f"inputs[{index}].{INPUT_FIELDS.get(one.field, one.field)}", one.description)
            for one in error.violations
        )
    )


# Fields of a request that mean another one of an input.
INPUT_FIELDS = {"chat": "pair", "prompt": "text"}


def result_of(stream: RequestStream) -> inference_pb2.Pooled:
    """Returns the result of a request that has ended. Raises `RequestError` if it has none."""
    end = stream.end
    if end is None or end.reason != types_pb2.FINISH_REASON_LENGTH:
        if end is not None and end.reason == types_pb2.FINISH_REASON_DEADLINE:
            raise RequestError(Reason.DEADLINE_PASSED, "the deadline passed before all inputs were computed")
        raise RequestError(Reason.CANCELLED, "an input was cancelled by its id")
    return inference_pb2.Pooled(
        values=stream.pooled, prompt_tokens=stream.num_prompt_tokens, cached_tokens=stream.num_cached_tokens
    )
