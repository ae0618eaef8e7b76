"""The spans of a placement on this executor, as children of its router's span.

    inflight.sequence       from its submit to its end
      inflight.prefill      from its seat to its next token; once more after it gave its seat up
      inflight.decode       from there to its end, or to the next pause

Requests that are not traced have none, and cost a comparison for each token.
"""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, get_current_span, set_span_in_context

from common.telemetry.trace_context import parent_context
from common.telemetry.tracing import Tracing
from executor.scheduler.sequence import FinishReason
from inflight.v1 import executor_pb2


def trace_submit(tracing: Tracing, submit: executor_pb2.Submit) -> SequenceTrace | None:
    """The trace of a placement; None where its request is not traced, or nobody collects traces."""
    if not tracing.is_on or not submit.traceparent:
        return None
    context = parent_context(submit.traceparent)
    if not get_current_span(context).get_span_context().trace_flags.sampled:
        return None
    return SequenceTrace(tracing.tracer, context, submit)


class SequenceTrace:
    """Tells a collector of one placement."""

    def __init__(self, tracer: Tracer, parent: Context, submit: executor_pb2.Submit) -> None:
        self._tracer = tracer
        self._prompt_tokens = len(submit.prompt_ids)
        self._whole = tracer.start_span(
            "inflight.sequence",
            parent,
            SpanKind.SERVER,
            {
                "inflight.attempt": submit.attempt,
                "inflight.prior_tokens": len(submit.prior_output_ids),
                "gen_ai.usage.input_tokens": self._prompt_tokens,
            },
        )
        self._context = set_span_in_context(self._whole, Context())
        self._phase: Span | None = None
        self._is_prefilling = False
        self._num_tokens = 0
        self._num_tokens_before = 0

    def start(self, cached_tokens: int) -> None:
        """It has a seat."""
        self._begin(
            "inflight.prefill",
            {"gen_ai.usage.input_tokens": self._prompt_tokens, "inflight.cached_tokens": cached_tokens},
        )
        self._is_prefilling = True

    def token(self) -> None:
        """It brought a token."""
        self._num_tokens += 1
        if self._is_prefilling:
            self._begin("inflight.decode", {})

    def pause(self) -> None:
        """It gave up its seat."""
        self._end_phase()
        self._whole.add_event("paused")

    def end(self, reason: FinishReason, error: str) -> None:
        """It ended. The error's text stays in the log."""
        self._end_phase()
        self._whole.set_attribute("gen_ai.usage.output_tokens", self._num_tokens)
        self._whole.set_attribute("gen_ai.response.finish_reasons", [reason.name.lower()])
        if error:
            self._whole.set_status(Status(StatusCode.ERROR))
        self._whole.end()

    def refuse(self, why: str) -> None:
        """It was not taken."""
        self._end_phase()
        self._whole.set_attribute("inflight.refused", why)
        self._whole.end()

    def _begin(self, name: str, attributes: dict[str, int]) -> None:
        self._end_phase()
        self._num_tokens_before = self._num_tokens
        self._phase = self._tracer.start_span(name, self._context, attributes=attributes)

    def _end_phase(self) -> None:
        if self._phase is not None:
            if not self._is_prefilling:
                # The first of a decode is what ended its prefill.
                self._phase.set_attribute("gen_ai.usage.output_tokens", self._num_tokens - self._num_tokens_before)
            self._phase.end()
        self._phase, self._is_prefilling = None, False
