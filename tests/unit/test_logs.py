"""A log for machines: every line is one JSON object, whatever was logged."""

from __future__ import annotations

import io
import json
import logging
import sys
from datetime import datetime
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from inflight.common.telemetry.logs import JsonFormatter, start_logging


class Log:
    """A logger whose lines are parsed."""

    def __init__(self) -> None:
        self.text = io.StringIO()
        self.logger = logging.Logger("the.logger")
        to_text = logging.StreamHandler(self.text)
        to_text.setFormatter(JsonFormatter("router"))
        self.logger.addHandler(to_text)

    def line(self) -> dict[str, Any]:
        (line,) = self.text.getvalue().splitlines()
        parsed: dict[str, Any] = json.loads(line)
        return parsed


def test_event_is_one_object_with_its_time_and_origin() -> None:
    log = Log()
    log.logger.warning("first line\nsecond %s", '"quoted" ä')
    event = log.line()
    assert datetime.fromisoformat(event.pop("time")).tzinfo is not None
    assert event == {
        "level": "warning",
        "process": "router",
        "logger": "the.logger",
        "message": 'first line\nsecond "quoted" ä',
    }


def test_exception_is_a_field_and_no_lines_of_its_own() -> None:
    log = Log()
    try:
        raise ValueError("because")
    except ValueError:
        log.logger.exception("failed")
    event = log.line()
    assert event["message"] == "failed"
    assert event["exception"].startswith("Traceback")
    assert event["exception"].endswith("ValueError: because")


def test_event_within_a_span_names_it() -> None:
    log = Log()
    with TracerProvider(shutdown_on_exit=False).get_tracer("t").start_as_current_span("s") as span:
        log.logger.info("within")
    context = span.get_span_context()
    event = log.line()
    assert (int(event["trace_id"], 16), int(event["span_id"], 16)) == (context.trace_id, context.span_id)
    assert (len(event["trace_id"]), len(event["span_id"])) == (32, 16)


@pytest.mark.parametrize(("log_format", "beginning"), [("text", "2"), ("json", "{")])
def test_process_logs_as_it_is_told(monkeypatch: pytest.MonkeyPatch, log_format: str, beginning: str) -> None:
    root, stderr = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(root, "handlers", [])  # without the handlers of pytest
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(sys, "stderr", stderr)
    start_logging("executor", "info", log_format)
    logging.getLogger("x").info("hello")
    assert stderr.getvalue().startswith(beginning)
    assert "executor" in stderr.getvalue()
