"""The deletion costs of executor pods, and the loop that updates them.

When Kubernetes makes a Deployment smaller it deletes first the pods with the least cost. Ours is the number of KV
blocks that sequences hold there, rounded up to a twentieth of the pool: each change is a write to the API server, which
Kubernetes asks to keep few. A pod without the annotation counts as 0, so an executor that starts or holds nothing goes
first.

Nothing else depends on the loop: if a router or the API server does not answer, the costs stay as they are, one line is
logged, and the next round tries again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping

from inflight.catalogue import ExecutorCapacity
from inflight.errors import InflightError
from inflight.sync import Client
from inflight.tools.pod_costs.health import LoopHealth
from inflight.tools.pod_costs.kubernetes_api import KubernetesApi, KubernetesError

log = logging.getLogger(__name__)

STEPS_OF_A_POOL = 20


def deletion_cost(executor: ExecutorCapacity) -> int:
    """Returns the live blocks, rounded up; 0 only without any."""
    step = max(1, executor.blocks_total // STEPS_OF_A_POOL)
    return -(-executor.blocks_used // step) * step


def changed_costs(executors: Iterable[ExecutorCapacity], annotated: Mapping[str, int | None]) -> dict[str, int]:
    """Returns the costs to write, by pod. `annotated` has the current ones; an executor's id is the name of its pod.

    A pod whose executor is unknown is left unchanged: it is starting, or no router reaches it.
    """
    costs = {executor.executor_id: deletion_cost(executor) for executor in executors}
    return {pod: costs[pod] for pod, borne in annotated.items() if pod in costs and costs[pod] != (borne or 0)}


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
