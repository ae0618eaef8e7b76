"""`inflight models`: the models that the routers serve."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from inflight.catalogue import Model
from inflight.cli.console import open_console
from inflight.cli.flags import add_connection_flags, connected
from inflight.cli.parser import CommandParser


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    parser = CommandParser(prog="inflight models", description="Lists the models that the routers serve.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_connection_flags(parser)
    flags = parser.parse_args(argv)
    with connected(flags) as client:
        models = client.list_models()
    if flags.json:
        print(json.dumps([asdict(model) for model in models]))
    else:
        open_console().print(models_table(models))
    return 0


def models_table(models: Sequence[Model]) -> Table:
    """Returns a row per model."""
    table = Table("model", "executors", "context", "vocabulary", "chat", "adapters", box=None, header_style="bold")
    for model in models:
        chat = "yes" if model.has_chat_template else "no"
        numbers = (str(model.num_executors), str(model.context_length), str(model.vocabulary_size))
        table.add_row(model.name, *numbers, chat, ", ".join(adapter.name for adapter in model.adapters))
    return table
