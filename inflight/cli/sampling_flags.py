"""The flags about a request that `generate` and `chat` share."""

from __future__ import annotations

import argparse

from inflight.requests import PRIORITIES, GenerateOptions


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags for model, sampling, stopping and admission. What is not given follows the model's own defaults."""
    group = parser.add_argument_group("request", "What is not given follows the model's own defaults.")
    group.add_argument("--model", metavar="NAME", help="model to ask, of `inflight models`; default: the only one")
    group.add_argument("--temperature", type=float, metavar="T", help="0 always takes the likeliest token")
    group.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens that sum to P")
    group.add_argument("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens; 0: from all")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    group.add_argument("--max-tokens", type=int, metavar="N", help="most tokens to produce")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    group.add_argument("--tenant", metavar="NAME", help="whose request it is; default: default")
    group.add_argument("--priority", choices=PRIORITIES, help="how urgent it is; default: standard")
    group.add_argument("--deadline", type=float, metavar="SECONDS", help="end it after so long, also while it waits")
    group.add_argument(
        "--first-token-deadline", type=float, metavar="SECONDS", help="end it unless it begins to answer within so long"
    )
    group.add_argument("--session", metavar="NAME", help="requests of one session are served by the same model variant")


def request_options(flags: argparse.Namespace) -> GenerateOptions:
    """The keywords of `Client.generate` that the flags stand for."""
    options: GenerateOptions = {}
    if flags.model is not None:
        options["model"] = flags.model
    if flags.temperature is not None:
        options["temperature"] = flags.temperature
    if flags.top_p is not None:
        options["top_p"] = flags.top_p
    if flags.top_k is not None:
        options["top_k"] = flags.top_k
    if flags.seed is not None:
        options["seed"] = flags.seed
    if flags.max_tokens is not None:
        options["max_tokens"] = flags.max_tokens
    if flags.stop:
        options["stop"] = flags.stop
    if flags.tenant is not None:
        options["tenant"] = flags.tenant
    if flags.priority is not None:
        options["priority"] = flags.priority
    if flags.deadline is not None:
        options["deadline_s"] = flags.deadline
    if flags.first_token_deadline is not None:
        options["first_token_deadline_s"] = flags.first_token_deadline
    if flags.session is not None:
        options["session_id"] = flags.session
    return options
