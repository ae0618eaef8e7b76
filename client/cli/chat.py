"""`inflight chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress

from client.cli.address import resolve_address
from client.cli.answer import print_answer
from client.cli.connection import add_connection_flags, connected
from client.cli.outcome import in_words
from client.cli.sampling_flags import add_sampling_flags, request_options
from client.errors import InflightError
from client.requests import ChatMessage, GenerateOptions
from client.sync import Client

COMMANDS = "/clear forgets the conversation, /exit leaves, Ctrl-C ends the answer."


class Conversation:
    """What was said so far."""

    def __init__(self, system: str | None) -> None:
        self._beginning: list[ChatMessage] = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[ChatMessage] = list(self._beginning)

    def clear(self) -> None:
        """Forgets all but the system message."""
        self.turns = list(self._beginning)

    def asking(self, text: str) -> list[ChatMessage]:
        """The conversation with the user's next message, which is not taken in yet."""
        return [*self.turns, {"role": "user", "content": text}]

    def answered(self, text: str, answer: str) -> None:
        """Takes in a message of the user's and what came back, be it broken off."""
        self.turns = [*self.asking(text), {"role": "assistant", "content": answer}]


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    flags = _parser().parse_args(argv)
    address = resolve_address(flags)
    conversation = Conversation(flags.system)
    with connected(flags) as client:
        client.list_models()  # says at once whether anybody answers
        if sys.stdin.isatty():
            with suppress(ImportError):
                importlib.import_module("readline")  # gives `input` editing and a history
            print(COMMANDS)
        while (text := _read_line()) is not None:
            if text == "/exit":
                break
            if text == "/clear":
                conversation.clear()
            elif text.startswith("/"):
                print(COMMANDS)
            elif text:
                _answer(client, conversation, text, request_options(flags), address)
    return 0


def _answer(client: Client, conversation: Conversation, text: str, options: GenerateOptions, address: str) -> None:
    stream = client.generate(chat=conversation.asking(text), **options)
    summary = ""
    try:
        summary = print_answer(stream, sys.stdout, sys.stderr)
    except KeyboardInterrupt:
        stream.cancel()
        summary = "ended"
    except InflightError as error:
        summary = f"error: {in_words(error, address)}"
    print()
    print(summary, file=sys.stderr)
    said = stream.transcript.choices[0].text
    if said:
        conversation.answered(text, said)


def _read_line() -> str | None:
    """The user's next line; `None` at the end of the input. Ctrl-C drops a half-written line."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            return input(prompt).strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            print(f"\n{COMMANDS}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="inflight chat", description=f"Talks with a model. {COMMANDS}")
    parser.add_argument("--system", metavar="TEXT", help="system message that the conversation begins with")
    add_sampling_flags(parser)
    add_connection_flags(parser)
    return parser
