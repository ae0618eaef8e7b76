"""The flags of a request that `generate` and `chat` share."""

from __future__ import annotations

import argparse

from inflight.requests import PRIORITIES, GenerateOptions


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags for model, sampling, stopping and admission. The default of each is the model's."""
    group = parser.add_argument_group("request", "The defaults are the model's.")
    group.add_argument(
        "--model", metavar="NAME", help="name of the model, see `inflight models`; default: the only one"
    )
    group.add_argument("--temperature", type=float, metavar="T", help="sampling temperature; 0 is greedy")
    group.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the most likely tokens whose probabilities sum to P"
    )
    group.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens; 0: from all")
    group.add_argument("--seed", type=int, metavar="N", help="random seed; the same seed gives the same output")
    group.add_argument("--max-tokens", type=int, metavar="N", help="maximum number of output tokens")
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text; may be repeated")
    group.add_argument("--tenant", metavar="NAME", help="tenant of the request; default: default")
    group.add_argument("--priority", choices=PRIORITIES, help="priority class; default: standard")
    group.add_argument(
        "--deadline", type=float, metavar="SECONDS", help="time limit of the request, including queueing"
    )
    group.add_argument("--first-token-deadline", type=float, metavar="SECONDS", help="time limit for the first token")
    group.add_argument("--session", metavar="NAME", help="session; its requests go to the same model variant")


def request_options(flags: argparse.Namespace) -> GenerateOptions:
    """The keywords of `Client.generate` that the flags set."""
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
