"""Logging of processes: one line per event on standard error, as text or as one JSON object. Prompts, outputs and keys
are never logged."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from opentelemetry.trace import format_span_id, format_trace_id, get_current_span


def start_logging(process: str, level: str, log_format: str = "text") -> None:
    """Configures the root logger of this process. `level` is a name of `logging`, any case; `log_format` is `text` or
    `json`."""
    to_stderr = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        to_stderr.setFormatter(JsonFormatter(process))
    else:
        to_stderr.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[to_stderr])


class JsonFormatter(logging.Formatter):
    """Formats an event as one JSON object on one line, with the ids of the current span, if there is one."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        event = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        span = get_current_span().get_span_context()
        if span.is_valid:
            event |= {"trace_id": format_trace_id(span.trace_id), "span_id": format_span_id(span.span_id)}
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            event["stack"] = self.formatStack(record.stack_info)
        return json.dumps(event, ensure_ascii=False)
