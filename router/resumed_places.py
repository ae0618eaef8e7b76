"""From where on a resumed stream is wanted, and whether there is so much of it."""

from __future__ import annotations

from inflight.v1 import inference_pb2

from common.errors import FieldViolation, invalid
from router.reading import Place
from router.refusals import beyond_output
from router.streams import RequestStream


def resumed_place(request: inference_pb2.ResumeRequest) -> Place:
    """How far the client of a resumed request has read."""
    for field, values in (("offsets", request.offsets), ("text_bytes", request.text_bytes)):
        if len(values) > 1:
            raise invalid(FieldViolation(field, f"has {len(values)} values; the request has one choice"))
    offset = request.offsets[0] if request.offsets else 0
    text_bytes = request.text_bytes[0] if request.text_bytes else None
    return Place(offset, text_bytes, is_started=bool(offset or text_bytes))


def check_place(place: Place, stream: RequestStream) -> None:
    """Raises `RequestError` where a client says that it has more than there is. Of what is still on its way from an
    executor that is known at its end."""
    assert stream.reading is not None
    most = stream.reading.accepted.max_tokens if stream.was_adopted else len(stream.output_ids)
    if place.offset > most:
        raise beyond_output(place.offset, most)
