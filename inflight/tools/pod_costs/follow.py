"""The loop that updates the deletion costs of executor pods.

Nothing else depends on it: if a router or the API server does not answer, the costs stay as they are, one line is
logged, and the next round tries again.
"""

from __future__ import annotations

import logging
import threading

from inflight.errors import InflightError
from inflight.sync import Client
from inflight.tools.pod_costs.costs import changed_costs
from inflight.tools.pod_costs.health import LoopHealth
from inflight.tools.pod_costs.kubernetes_api import KubernetesApi, KubernetesError

log = logging.getLogger(__name__)


def follow(
    client: Client,
    api: KubernetesApi,
    selector: str,
    interval_s: float,
    stopped: threading.Event,
    health: LoopHealth,
) -> None:
    """Updates the costs at once and then every `interval_s` seconds, until `stopped`."""
    trouble = ""
    while True:
        said = _round(client, api, selector)
        health.round_ended(said)
        if said and said != trouble:
            log.warning("costs stay as they are: %s", said)
        elif trouble and not said:
            log.info("costs are written again")
        trouble = said
        if stopped.wait(interval_s):
            return


def _round(client: Client, api: KubernetesApi, selector: str) -> str:
    """Writes the costs that changed; returns an error text, which may be empty."""
    try:
        changed = changed_costs(client.capacity().executors, api.costs(selector))
        for pod, cost in sorted(changed.items()):
            if api.set_cost(pod, cost):
                log.debug("pod %s costs %d", pod, cost)
    except InflightError as error:
        return f"no router says what executors hold: {error}"
    except KubernetesError as error:
        return str(error)
    return ""
