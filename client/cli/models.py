"""`inflight models`: the models that can be asked for."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from client.catalogue import Model
from client.cli import terminal
from client.cli.address import add_address_flags, resolve_address
from client.cli.outcome import errors_in_words
from client.sync import Client


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="inflight models", description="Lists the models that can be asked for.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_address_flags(parser)
    flags = parser.parse_args(argv)
    address = resolve_address(flags)
    with errors_in_words(address), Client(address) as client:
        models = client.list_models()
    if flags.json:
        print(json.dumps([asdict(model) for model in models]))
    else:
        terminal.console().print(models_table(models))
    return 0


def models_table(models: Sequence[Model]) -> Table:
    """A row per model."""
    table = Table("model", "executors", "context", "vocabulary", "chat", box=None, header_style="bold")
    for model in models:
        chat = "yes" if model.has_chat_template else "no"
        table.add_row(model.name, str(model.num_executors), str(model.context_length), str(model.vocabulary_size), chat)
    return table
