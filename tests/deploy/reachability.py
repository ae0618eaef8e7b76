"""Reachability of pods' ports by NetworkPolicies, as Kubernetes evaluates them. Pure.

A connection is let through where the egress of the one and the ingress of the other let it through; a side that no
policy selects in that direction is open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.deploy.manifests import NAMESPACE, Object, matches


@dataclass(frozen=True, slots=True)
class PodKind:
    """Pods that are alike to policies. `ports` are those that they listen on."""

    name: str
    labels: Mapping[str, str]
    ports: frozenset[int]
    namespace: str = NAMESPACE


def flows(policies: Iterable[Object], pods: Iterable[PodKind]) -> set[tuple[str, str, int]]:
    """Every (from, to, port) that is let through."""
    policies, pods = list(policies), list(pods)
    return {
        (source.name, target.name, port)
        for source in pods
        for target in pods
        for port in target.ports
        if _lets(policies, "Egress", source, target, port) and _lets(policies, "Ingress", target, source, port)
    }


def _lets(policies: Iterable[Object], direction: str, pod: PodKind, peer: PodKind, port: int) -> bool:
    selecting = [
        policy["spec"]
        for policy in policies
        if direction in policy["spec"]["policyTypes"]
        and policy["metadata"]["namespace"] == pod.namespace
        and matches(policy["spec"]["podSelector"], pod.labels)
    ]
    if not selecting:
        return True
    peers = "to" if direction == "Egress" else "from"
    rules = [rule for spec in selecting for rule in spec.get(direction.lower(), ())]
    return any(_has_port(rule, port) and _has_peer(rule.get(peers), pod, peer) for rule in rules)


def _has_port(rule: Mapping[str, Any], port: int) -> bool:
    return "ports" not in rule or any(one["port"] == port for one in rule["ports"])


def _has_peer(peers: Iterable[Mapping[str, Any]] | None, pod: PodKind, peer: PodKind) -> bool:
    return peers is None or any(_is_peer(one, pod, peer) for one in peers)


def _is_peer(one: Mapping[str, Any], pod: PodKind, peer: PodKind) -> bool:
    assert set(one) <= {"podSelector", "namespaceSelector"}
    if "namespaceSelector" not in one:
        return peer.namespace == pod.namespace and matches(one["podSelector"], peer.labels)
    in_namespace = matches(one["namespaceSelector"], {"kubernetes.io/metadata.name": peer.namespace})
    return in_namespace and matches(one.get("podSelector", {}), peer.labels)
