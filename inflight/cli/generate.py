"""`inflight generate`: streams the answer to one prompt."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict

from inflight.catalogue import Model
from inflight.cli.answer import print_answer
from inflight.cli.console import EXIT_USAGE, CommandError
from inflight.cli.flags import (
    add_choice_flags,
    add_connection_flags,
    add_sampling_flags,
    choice_options,
    connected,
    request_options,
)
from inflight.cli.parser import CommandParser
from inflight.events import Choice, Completion, Logprob, PositionLogprobs
from inflight.requests import ChatMessage
from inflight.sync import Client
from inflight.sync_stream import Stream

EXAMPLE = 'inflight generate "Name three fruits."'


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    flags = _parser().parse_args(argv)
    if flags.raw and flags.system is not None:
        raise CommandError("--raw: not allowed with --system, which needs a chat", EXIT_USAGE)
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
    """Returns the whole result as one line of JSON, with the request's token if it is given."""
    reason = result.finish_reason
    shown = {} if resume_token is None else {"resume_token": resume_token}
    return json.dumps(
        {
            "request_id": result.request_id,
            "text": result.text,
            "finish_reason": None if reason is None else reason.value,
            "constraint_unfinished": result.constraint_unfinished,
            "usage": asdict(result.usage),
            "timing": asdict(result.timing),
            **_prompt_scores(result),
            **({"choices": [_choice_json(choice) for choice in result.choices]} if len(result.choices) > 1 else {}),
            **shown,
        },
        ensure_ascii=False,
    )


def _choice_json(choice: Choice) -> dict[str, str | None]:
    reason = choice.finish_reason
    return {"text": choice.text, "finish_reason": None if reason is None else reason.value}


def _prompt_scores(result: Completion) -> dict[str, object]:
    """Returns an object for each token of the prompt, if requested. The first has no log probability."""
    if not result.prompt_logprobs:
        return {}
    tokens = zip(result.prompt_token_ids, result.prompt_logprobs, strict=True)
    return {"prompt_logprobs": [{"token_id": i} if one is None else _score(one) for i, one in tokens]}


def _score(position: PositionLogprobs) -> dict[str, object]:
    chosen, *top = ({**_value(one), "rank": one.rank} for one in (position.chosen, *position.top))
    return {**chosen, "top": top} if top else chosen


def _value(one: Logprob) -> dict[str, object]:
    # JSON has no infinity.
    logprob = one.logprob if math.isfinite(one.logprob) else None
    return {"token_id": one.token_id, "text": one.text, "logprob": logprob}


def _send(client: Client, prompt: str, flags: argparse.Namespace) -> Stream:
    options = request_options(flags)
    if flags.echo:
        options["echo"] = True
    if flags.stream_interval is not None:
        options["stream_interval"] = flags.stream_interval
    if flags.prompt_logprobs is not None:
        options["want_prompt_logprobs"], options["top_prompt_logprobs"] = True, flags.prompt_logprobs
    options.update(choice_options(flags))
    if flags.request_id is not None:
        options["request_id"] = flags.request_id
    if flags.raw or not (flags.chat or flags.system is not None or _has_chat_template(client, flags.model)):
        return client.generate(prompt, timeout=flags.timeout, **options)
    turns: list[ChatMessage] = [{"role": "user", "content": prompt}]
    if flags.system is not None:
        turns.insert(0, {"role": "system", "content": flags.system})
    return client.generate(chat=turns, timeout=flags.timeout, **options)


def _has_chat_template(client: Client, name: str | None) -> bool:
    """Returns whether the model has a chat template. An unknown name is left for `Generate` to refuse."""
    models = [model for model in client.list_models() if name in (None, model.name, *_adapted_names(model))]
    return bool(models) and all(model.has_chat_template for model in models)


def _adapted_names(model: Model) -> list[str]:
    """Returns the names of the model with each of its adapters."""
    return [f"{model.name}:{adapter.name}" for adapter in model.adapters]


def _read_prompt(given: str | None) -> str:
    if given is None and sys.stdin.isatty():
        raise CommandError(f"no prompt; example: {EXAMPLE}; - reads it from standard input", EXIT_USAGE)
    prompt = sys.stdin.read() if given in (None, "-") else str(given)
    if not prompt.strip():
        raise CommandError(f"the prompt is empty; example: {EXAMPLE}", EXIT_USAGE)
    return prompt


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="inflight generate",
        description="Streams the answer to one prompt to standard output and prints a summary to standard error. The "
        "prompt is sent as a user message if the model has a chat template, otherwise as plain text to complete.",
    )
    parser.add_argument("prompt", nargs="?", help="the prompt; - reads it from standard input")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="send the prompt as a user message")
    form.add_argument("--raw", action="store_true", help="send the prompt as plain text to complete")
    parser.add_argument("--system", metavar="TEXT", help="system message before the user message")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the text")
    parser.add_argument(
        "--request-id", metavar="ID", help="id of the request, for `inflight explain` and `inflight cancel`"
    )
    parser.add_argument(
        "--show-token",
        action="store_true",
        help="print to standard error the command that explains the request, with the token that `inflight explain` "
        "and `inflight cancel` need if the router authenticates callers; with --json the token is part of the object",
    )
    parser.add_argument("--echo", action="store_true", help="begin the text with the prompt")
    parser.add_argument(
        "--stream-interval", type=int, metavar="N", help="number of tokens per streamed event, 1 to 1024; default: 1"
    )
    parser.add_argument(
        "--prompt-logprobs",
        type=int,
        metavar="K",
        help="print the log probability and rank of each token of the prompt to standard error, with the K likeliest "
        "in its place, 0 to 20; with --json they are part of the object",
    )
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="cancel the request after this time")
    add_sampling_flags(parser)
    add_choice_flags(parser)
    add_connection_flags(parser)
    return parser
