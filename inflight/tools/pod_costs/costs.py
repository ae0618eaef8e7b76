"""Deletion costs of pods, from the KV blocks that their executors hold. Pure.

When Kubernetes makes a Deployment smaller it deletes first the pods with the least
`controller.kubernetes.io/pod-deletion-cost`. Ours is the number of KV blocks that sequences hold there, rounded up to
a twentieth of the pool: each change is a write to the API server, which Kubernetes asks to keep few. A pod without the
annotation counts as 0, so an executor that starts or holds nothing goes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from inflight.catalogue import ExecutorCapacity

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
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
