"""`inflight generate`: streams the answer to one prompt."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from inflight.cli.answer import print_answer
from inflight.cli.connection import add_connection_flags, connected
from inflight.cli.outcome import EXIT_USAGE, CommandError
from inflight.cli.parser import CommandParser
from inflight.cli.sampling_flags import add_sampling_flags, request_options
from inflight.events import Completion
from inflight.requests import ChatMessage
from inflight.sync import Client
from inflight.sync_stream import Stream

EXAMPLE = 'inflight generate "Name three fruits."'


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    flags = _parser().parse_args(argv)
    prompt = _read_prompt(flags.prompt)
    with connected(flags) as client:
        stream = _send(client, prompt, flags)
        if flags.json:
            result = stream.result()
            print(as_json(result, stream.resume_token if flags.show_token else None))
            return 0
        summary = print_answer(stream, sys.stdout, sys.stderr, shows_token=flags.show_token)
        print()
        print(summary, file=sys.stderr)
    return 0


def as_json(result: Completion, resume_token: str | None = None) -> str:
    """The whole result as one JSON object on one line, with the request's token where that is given."""
    reason = result.finish_reason
    shown = {} if resume_token is None else {"resume_token": resume_token}
    return json.dumps(
        {
            "request_id": result.request_id,
            "text": result.text,
            "finish_reason": None if reason is None else reason.value,
            "usage": asdict(result.usage),
            "timing": asdict(result.timing),
            **shown,
        },
        ensure_ascii=False,
    )


def _send(client: Client, prompt: str, flags: argparse.Namespace) -> Stream:
    options = request_options(flags)
    if flags.request_id is not None:
        options["request_id"] = flags.request_id
    if flags.raw or not (flags.chat or flags.system is not None or _has_chat_template(client, flags.model)):
        return client.generate(prompt, timeout=flags.timeout, **options)
    turns: list[ChatMessage] = [{"role": "user", "content": prompt}]
    if flags.system is not None:
        turns.insert(0, {"role": "system", "content": flags.system})
    return client.generate(chat=turns, timeout=flags.timeout, **options)


def _has_chat_template(client: Client, name: str | None) -> bool:
    """Whether the model that will answer has one; a name that does not exist is for `Generate` to refuse."""
    models = [model for model in client.list_models() if name in (None, model.name)]
    return bool(models) and all(model.has_chat_template for model in models)


def _read_prompt(given: str | None) -> str:
    if given is None and sys.stdin.isatty():
        raise CommandError(f"give a prompt, as in: {EXAMPLE}; or - to read it from standard input", EXIT_USAGE)
    prompt = sys.stdin.read() if given in (None, "-") else str(given)
    if not prompt.strip():
        raise CommandError(f"the prompt is empty; give one, as in: {EXAMPLE}", EXIT_USAGE)
    return prompt


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="inflight generate",
        description="Streams the answer to one prompt to standard output, and a line about it to standard error. The "
        "prompt is a chat message of the user's where the model has a chat template, and else text to go on with.",
    )
    parser.add_argument("prompt", nargs="?", help="the prompt; - reads it from standard input")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="the prompt is a chat message")
    form.add_argument("--raw", action="store_true", help="the prompt is text to go on with")
    parser.add_argument("--system", metavar="TEXT", help="system message before the chat message")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead")
    parser.add_argument("--request-id", metavar="ID", help="id to ask about it with `inflight explain`")
    parser.add_argument(
        "--show-token",
        action="store_true",
        help="say on standard error how to ask about it, with the token that `inflight explain` and `inflight cancel` "
        "need where the router identifies its callers; with --json it is part of the object",
    )
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="end the request after this long")
    add_sampling_flags(parser)
    add_connection_flags(parser)
    return parser
