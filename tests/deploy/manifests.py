"""Rendered overlays, and queries of tests on them: objects by kind, pod templates, the environment of a container.

Everything is read as Kubernetes reads it: `$(NAME)` stands for variables that are defined before, `envFrom` comes
first, a ConfigMap or Secret that is not there is an error.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from inflight.cli.deploy.kube_secrets import api_key_secrets, certificate_secrets, random_secrets

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAYS = tuple(sorted(path.name for path in (FOLDER / "overlays").iterdir()))
NAMESPACE = "inflight"
WORKLOADS = ("Deployment", "StatefulSet")
COMPONENT = "app.kubernetes.io/component"
# What processes listen on, and Redis: every interface, with IPv6 where there is any.
EVERYWHERE = ("[::]", "* -::*")

Object = Mapping[str, Any]

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl, which renders overlays, is not here"
)


@dataclass(frozen=True, slots=True)
class Overlay:
    """A rendered overlay, with the Secrets that its user makes beside it."""

    name: str
    objects: tuple[Object, ...]

    def of_kind(self, *kinds: str) -> list[Object]:
        """Objects of these kinds."""
        return [found for found in self.objects if found["kind"] in kinds]

    def find(self, kind: str, name: str) -> Object | None:
        """The object of a kind and a name."""
        return next((found for found in self.of_kind(kind) if found["metadata"]["name"] == name), None)

    def workload(self, component: str) -> Object:
        """The workload of a component, which must be the only one."""
        (found,) = (w for w in self.of_kind(*WORKLOADS) if w["metadata"]["labels"][COMPONENT] == component)
        return found

    def containers(self) -> Iterator[tuple[Object, Object]]:
        """Every container, init containers too, with its workload."""
        for workload in self.of_kind(*WORKLOADS):
            spec = workload["spec"]["template"]["spec"]
            for container in (*spec.get("initContainers", ()), *spec["containers"]):
                yield workload, container

    def content(self, kind: str, name: str) -> Mapping[str, bytes]:
        """What is in a ConfigMap or Secret; fails where there is none."""
        found = self.find(kind, name)
        assert found is not None, f"{self.name}: there is no {kind} {name}"
        if kind == "ConfigMap":
            return {key: value.encode() for key, value in found["data"].items()}
        return dict(found["content"])


@functools.cache
def rendered(folder: Path) -> tuple[Object, ...]:
    """What `kubectl kustomize` makes of a folder."""
    program = shutil.which("kubectl")
    assert program is not None
    ran = subprocess.run([program, "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    return tuple(yaml.safe_load_all(ran.stdout))


@functools.cache
def overlay(name: str) -> Overlay:
    """An overlay by its folder's name."""
    objects = rendered(FOLDER / "overlays" / name)
    return Overlay(name, (*objects, *secrets_beside(objects)))


def secrets_beside(objects: tuple[Object, ...]) -> Iterator[Object]:
    """Secrets that `inflight kube-secrets` makes, certificates in the place of cert-manager's, too."""
    made = random_secrets() | api_key_secrets()
    made |= certificate_secrets(NAMESPACE, [f"127.1.0.{last}" for last in range(1, 10)], 1)
    named = {found["spec"]["secretName"] for found in objects if found["kind"] == "Certificate"}
    assert not named or {"inflight-router-tls", "inflight-executor-tls", "inflight-client-tls"} <= named
    for name, content in made.items():
        encoded = {key: b64encode(value).decode() for key, value in content.items()}
        metadata = {"name": name, "namespace": NAMESPACE}
        yield {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": encoded, "content": content}


def environment_of(overlay: Overlay, container: Object, fields: Mapping[str, str]) -> dict[str, str]:
    """A container's environment; `fields` are those of its pod that it may ask for."""
    environment: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        content = overlay.content("ConfigMap", source["configMapRef"]["name"])
        environment |= {name: value.decode() for name, value in content.items()}
    for variable in container.get("env", ()):
        environment[variable["name"]] = _value(overlay, variable, environment, fields)
    return environment


def _value(overlay: Overlay, variable: Object, defined: Mapping[str, str], fields: Mapping[str, str]) -> str:
    if (source := variable.get("valueFrom")) is None:
        return expanded(str(variable["value"]), defined)
    if "fieldRef" in source:
        return fields[source["fieldRef"]["fieldPath"]]
    reference = source["secretKeyRef"]
    return overlay.content("Secret", reference["name"])[reference["key"]].decode()


def expanded(text: str, defined: Mapping[str, str]) -> str:
    """`$(NAME)` as Kubernetes reads it; a name that is not defined before it is an error in our manifests."""
    return re.sub(r"\$\((\w+)\)", lambda found: defined[found[1]], text)


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector selects these labels."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for rule in selector.get("matchExpressions", ()):
        assert rule["operator"] == "In"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return True


def pod_labels(workload: Object) -> Mapping[str, str]:
    """The labels of a workload's pods."""
    labels: Mapping[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels
