"""`inflight chat`: a conversation with a model in the terminal, or through a pipe."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType

from inflight.cli.answer import print_answer
from inflight.cli.call_errors import in_words
from inflight.cli.chat.commands import ALIASES, COMMANDS, ChatState, run_command
from inflight.cli.chat.conversation import Conversation, ConversationError
from inflight.cli.chat.prompt import Prompt, default_history_file, line_editing
from inflight.cli.console import EXIT_USAGE, CommandError
from inflight.cli.flags import add_connection_flags, add_sampling_flags, connected, request_options, resolve_addresses
from inflight.cli.parser import CommandParser
from inflight.errors import InflightError
from inflight.sync import Client
from inflight.sync_stream import Stream

GREETING = "/help lists the commands, Ctrl-C stops the answer, Ctrl-D exits."


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    flags = _parser().parse_args(argv)
    address = ", ".join(resolve_addresses(flags))
    is_terminal = sys.stdin.isatty()
    conversation = _begin(flags)
    with connected(flags) as client:

        def model_names() -> list[str]:
            return [model.name for model in client.list_models()]

        names = model_names()  # fails at once if no router answers
        state = ChatState(conversation, model_names, request_options(flags))
        if is_terminal:
            print(f"{_model_in_words(state, names)} at {address}. {GREETING}")
        with _editing(flags) if is_terminal else nullcontext():
            _converse(client, state, Prompt(is_terminal=is_terminal), address)
    return 0


def _model_in_words(state: ChatState, names: Sequence[str]) -> str:
    """Returns the model that answers, or those to choose from."""
    chosen = state.options.get("model")
    if chosen or len(names) == 1:
        return chosen or names[0]
    return f"{', '.join(names)} (/model NAME chooses one)" if names else "No model"


def _begin(flags: argparse.Namespace) -> Conversation:
    conversation = Conversation(flags.system)
    if flags.load is not None:
        try:
            conversation.load(Path(flags.load))
        except ConversationError as error:
            raise CommandError(f"--load: {error}", EXIT_USAGE) from None
        if flags.system is not None:
            conversation.system = flags.system
    return conversation


def _converse(client: Client, state: ChatState, prompt: Prompt, address: str) -> None:
    while not state.has_left and (text := prompt.read()) is not None:
        if text.startswith("/") and not text.startswith("//"):
            _command(state, text, address)
        elif text:
            _answer(client, state, text.removeprefix("/") if text.startswith("//") else text, address)


def _command(state: ChatState, line: str, address: str) -> None:
    try:
        said = run_command(state, line)
    except InflightError as error:
        said = f"error: {in_words(error, address)}"
    if said:
        print(said, file=sys.stderr)


def _answer(client: Client, state: ChatState, text: str, address: str) -> None:
    try:
        stream = client.generate(chat=state.conversation.asking(text), **state.options)
    except (InflightError, ValueError) as error:  # ValueError: a value of /set that does not fit its field
        print(f"error: {error}", file=sys.stderr)
        return
    try:
        with _ctrl_c_cancels(stream):
            summary = print_answer(stream, sys.stdout, sys.stderr)
    except KeyboardInterrupt:
        stream.cancel()
        summary = "cancelled"
    except InflightError as error:
        summary = f"error: {in_words(error, address)}"
    print()
    print(summary, file=sys.stderr)
    said = stream.transcript.choices[0].text
    if said:
        state.conversation.answered(text, said)


@contextmanager
def _ctrl_c_cancels(stream: Stream) -> Iterator[None]:
    """Makes the first Ctrl-C cancel the stream, which then ends without an error. A second one raises as usual.

    An exception inside gRPC's code may be lost, or be raised while a lock is held, so the signal raises none: it
    cancels from another thread.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=stream.cancel, daemon=True).start()

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _editing(flags: argparse.Namespace) -> AbstractContextManager[None]:
    history_file = None if flags.no_history else Path(flags.history_file or default_history_file())
    return line_editing(history_file, [f"/{name}" for name in (*COMMANDS, *ALIASES)])


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="inflight chat", description=f"Chats with a model. {GREETING}")
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    parser.add_argument("--load", metavar="FILE", help="continue a conversation that /save has written")
    history = parser.add_mutually_exclusive_group()
    history.add_argument(
        "--history-file",
        metavar="FILE",
        help="file of the input history; default: ~/.local/state/inflight/chat_history",
    )
    history.add_argument("--no-history", action="store_true", help="keep no input history")
    add_sampling_flags(parser)
    add_connection_flags(parser)
    return parser
