"""`inflight pod-costs`: sets the deletion cost of executor pods, so that Kubernetes deletes the least busy first."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack

from inflight.cli.console import EXIT_USAGE, CommandError
from inflight.cli.flags import add_connection_flags, connected
from inflight.cli.parser import CommandParser
from inflight.common.rpc.server import ListenError, bind
from inflight.common.telemetry.logs import start_logging
from inflight.tools.pod_costs.follow import follow
from inflight.tools.pod_costs.health import LoopHealth, served
from inflight.tools.pod_costs.kubernetes_api import ANNOTATION, KubernetesApi, KubernetesError

DEFAULT_SELECTOR = "app.kubernetes.io/name=inflight,app.kubernetes.io/component=executor"


def main(argv: Sequence[str]) -> int:
    """Runs until SIGTERM or SIGINT."""
    flags = _parser().parse_args(argv)
    if not 1 <= flags.interval_s <= 3600:
        raise CommandError(f"--interval-s: {flags.interval_s} is not between 1 and 3600", EXIT_USAGE)
    start_logging("pod-costs", flags.log_level)
    try:
        api = KubernetesApi.of_pod()
    except KubernetesError as error:
        raise CommandError(str(error), EXIT_USAGE) from None
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    health = LoopHealth(flags.interval_s)
    with ExitStack() as stack:
        if flags.health_listen:
            try:
                stack.enter_context(served(health, bind(flags.health_listen)))
            except ListenError as error:
                raise CommandError(f"--health-listen: {error}", EXIT_USAGE) from None
        client = stack.enter_context(connected(flags))
        follow(client, api, flags.selector, flags.interval_s, stopped, health)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="inflight pod-costs",
        description=f"Runs in a pod. Keeps {ANNOTATION} of executor pods at the number of KV blocks that sequences "
        "use there, so that a Deployment that is scaled down deletes the least busy pods first. An executor's id must "
        "be the name of its pod. The service account needs to list and patch pods.",
    )
    add_connection_flags(parser)
    parser.add_argument(
        "--selector",
        default=DEFAULT_SELECTOR,
        metavar="LABELS",
        help=f"label selector of the executor pods (default: {DEFAULT_SELECTOR})",
    )
    parser.add_argument(
        "--interval-s", type=float, default=10.0, metavar="S", help="seconds between two updates (default: 10)"
    )
    parser.add_argument(
        "--health-listen",
        default="",
        metavar="HOST:PORT",
        help="port for probes: /health while rounds are made, /ready while the last one succeeded (default: none)",
    )
    parser.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"), help="least severe level logged"
    )
    return parser
