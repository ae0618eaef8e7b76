"""The two calls of the Kubernetes API that pod costs need: list pods, and patch one annotation.

Plain HTTPS with the pod's service account: a client library would be larger than the whole command. The token is read
for each call, because the kubelet renews it.
"""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

# The pods with the least are deleted first.
ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 10.0
# One page: more executors in a namespace are not expected.
MAX_PODS = 5000


class KubernetesError(Exception):
    """A call of the Kubernetes API did not succeed. The text says which and why."""


@dataclass(frozen=True, slots=True)
class KubernetesApi:
    """An API server, a namespace, and the credentials."""

    url: str
    namespace: str
    token_file: Path
    ca_file: Path | None

    @classmethod
    def of_pod(cls, environment: Mapping[str, str] = os.environ, account: Path = SERVICE_ACCOUNT) -> KubernetesApi:
        """Returns the API as a pod finds it. Raises `KubernetesError` outside of a pod."""
        host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise KubernetesError("not in a pod: KUBERNETES_SERVICE_HOST is not set")
        try:
            namespace = (account / "namespace").read_text(encoding="utf-8").strip()
        except OSError as error:
            raise KubernetesError(f"this pod has no service account: {error.strerror}: {error.filename}") from None
        address = f"[{host}]" if ":" in host else host
        return cls(f"https://{address}:{port}", namespace, account / "token", account / "ca.crt")

    def costs(self, selector: str) -> dict[str, int | None]:
        """Returns the deletion cost of each pod of the selector; None if it has none that can be read."""
        query = urlencode({"labelSelector": selector, "limit": MAX_PODS})
        pods = self._call("GET", f"pods?{query}")["items"]
        return {pod["metadata"]["name"]: _cost(pod["metadata"].get("annotations") or {}) for pod in pods}

    def set_cost(self, pod: str, cost: int) -> bool:
        """Writes a pod's deletion cost; False if the pod no longer exists."""
        patch = {"metadata": {"annotations": {ANNOTATION: str(cost)}}}
        try:
            self._call("PATCH", f"pods/{quote(pod, safe='')}", patch)
        except _GoneError:
            return False
        return True

    def _call(self, method: str, path: str, body: object = None) -> Any:
        url = f"{self.url}/api/v1/namespaces/{quote(self.namespace, safe='')}/{path}"
        try:
            headers = {"Authorization": f"Bearer {self.token_file.read_text(encoding='ascii').strip()}"}
            content = None if body is None else json.dumps(body).encode()
            if content is not None:
                headers["Content-Type"] = "application/merge-patch+json"
            request = urllib.request.Request(url, content, headers, method=method)
            with self._opener().open(request, timeout=TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                kind = _GoneError if error.code == 404 else KubernetesError
                raise kind(f"{method} {path.partition('?')[0]}: status {error.code}") from None
        except (OSError, ValueError) as error:
            raise KubernetesError(f"{method} {path.partition('?')[0]}: {error}") from None

    def _opener(self) -> urllib.request.OpenerDirector:
        """Opens the API without a proxy: the server is in the cluster. Its authority is read each time, as it may be
        renewed."""
        openers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self.ca_file is not None:
            context = ssl.create_default_context(cafile=str(self.ca_file))
            openers.append(urllib.request.HTTPSHandler(context=context))
        return urllib.request.build_opener(*openers)


class _GoneError(KubernetesError):
    """The pod no longer exists."""


def _cost(annotations: Mapping[str, str]) -> int | None:
    try:
        return int(annotations[ANNOTATION])
    except (KeyError, ValueError):
        return None
