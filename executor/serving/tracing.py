"""Spans of a placement on this executor, as children of its router's span.

    inflight.sequence       from its submit to its end
      inflight.prefill      from boarding to its next token; again after each preemption
      inflight.decode       from there to its end, or to the next preemption

Requests that are not traced have no spans and cost one comparison per token.
"""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, get_current_span, set_span_in_context

from inflight.common.telemetry.trace_context import parent_context
from inflight.common.telemetry.tracing import Tracing
from inflight.executor.scheduler.sequence import FinishReason
from inflight.v1 import executor_pb2


def trace_submit(tracing: Tracing, submit: executor_pb2.Submit) -> SequenceTrace | None:
    """Returns the trace of a placement; None if its request is not traced or no collector is set."""
    if not tracing.is_on or not submit.traceparent:
        return None
    context = parent_context(submit.traceparent)
    if not get_current_span(context).get_span_context().trace_flags.sampled:
        return None
    return SequenceTrace(tracing.tracer, context, submit)


class SequenceTrace:
    """The spans of one placement."""

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
        """Begins the prefill span: the sequence has boarded."""
        self._begin(
            "inflight.prefill",
            {"gen_ai.usage.input_tokens": self._prompt_tokens, "inflight.cached_tokens": cached_tokens},
        )
        self._is_prefilling = True

    def token(self) -> None:
        """Counts a token. The first one ends the prefill span."""
        self._num_tokens += 1
        if self._is_prefilling:
            self._begin("inflight.decode", {})

    def preempt(self) -> None:
        """Ends the phase: the sequence was preempted."""
        self._end_phase()
        self._whole.add_event("paused")

    def end(self, reason: FinishReason, error: str) -> None:
        """Ends all spans. The error's text is only logged."""
        self._end_phase()
        self._whole.set_attribute("gen_ai.usage.output_tokens", self._num_tokens)
        self._whole.set_attribute("gen_ai.response.finish_reasons", [reason.name.lower()])
        if error:
            self._whole.set_status(Status(StatusCode.ERROR))
        self._whole.end()

    def refuse(self, why: str) -> None:
        """Ends the span of a refused placement."""
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
                # The first token of a decode is counted as its prefill's.
                self._phase.set_attribute("gen_ai.usage.output_tokens", self._num_tokens - self._num_tokens_before)
            self._phase.end()
        self._phase, self._is_prefilling = None, False
