"""Pod costs: what executors hold becomes an annotation of their pods, through an API server that is asked over TLS."""

from __future__ import annotations

import dataclasses
import json
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import grpc
import pytest

from inflight import Client
from inflight.catalogue import Capacity, ExecutorCapacity
from inflight.cli.deploy.pod_costs import DEFAULT_SELECTOR
from inflight.common.rpc.server import bind
from inflight.errors import InflightError
from inflight.local.certificates import make_certificates
from inflight.tools.pod_costs.follow import changed_costs, deletion_cost, follow
from inflight.tools.pod_costs.health import LoopHealth, served
from inflight.tools.pod_costs.kubernetes_api import ANNOTATION, KubernetesApi, KubernetesError
from tests.deploy.manifests import matches, needs_kubectl, overlay, pod_labels

TOKEN = "a-token"


def executor(executor_id: str, used: int, total: int = 1000) -> ExecutorCapacity:
    return ExecutorCapacity(
        executor_id=executor_id,
        model="m",
        accepting=True,
        seats_total=8,
        seats_used=0,
        num_waiting=0,
        blocks_total=total,
        blocks_used=used,
        blocks_reserved=used,
        blocks_cached=0,
        block_size=16,
        output_tokens_per_s=0.0,
        step_ms=0.0,
        batching="inflight",
        num_steps=0,
    )


@pytest.mark.parametrize(("used", "cost"), [(0, 0), (1, 50), (50, 50), (51, 100), (1000, 1000)])
def test_cost_is_live_blocks_in_twentieths_of_the_pool(used: int, cost: int) -> None:
    assert deletion_cost(executor("a", used)) == cost


def test_pool_smaller_than_its_twentieths_is_counted_by_the_block() -> None:
    assert deletion_cost(executor("a", 3, total=7)) == 3


def test_only_what_changes_is_written() -> None:
    executors = [
        executor("busy", 400),
        executor("same", 400),
        executor("idle", 0),
        executor("freed", 0),
        executor("x", 9),
    ]
    annotated = {"busy": 50, "same": 400, "idle": None, "freed": 50, "starting": 700}
    assert changed_costs(executors, annotated) == {"busy": 400, "freed": 0}


class ApiServer:
    """Two calls of the Kubernetes API, over TLS, for who has the token."""

    def __init__(self, folder: Path) -> None:
        self.pods: dict[str, dict[str, str]] = {}
        self.selectors: list[str] = []
        self.patched = threading.Semaphore(0)
        made = make_certificates(folder / "certificates")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(made.certificate("router"), made.key("router"))
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _calls_of(self))
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        token_file = folder / "token"
        token_file.write_text(TOKEN)
        url = f"https://127.0.0.1:{self.server.server_port}"
        self.api = KubernetesApi(url, "inflight", token_file, made.ca_file)

    def answer(self, method: str, url: str, body: bytes, token: str | None) -> tuple[int, Any]:
        path = urlsplit(url)
        if token != f"Bearer {TOKEN}":
            return 401, {}
        if method == "GET" and path.path == "/api/v1/namespaces/inflight/pods":
            self.selectors += parse_qs(path.query)["labelSelector"]
            items = [{"metadata": {"name": name, "annotations": pod}} for name, pod in self.pods.items()]
            return 200, {"items": items}
        name = path.path.rpartition("/")[2]
        if name not in self.pods:
            return 404, {}
        self.pods[name] |= json.loads(body)["metadata"]["annotations"]
        self.patched.release()
        return 200, {}


def _calls_of(api: ApiServer) -> type[BaseHTTPRequestHandler]:
    class Calls(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, answer = api.answer(self.command, self.path, body, self.headers["Authorization"])
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_PATCH = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    return Calls


@pytest.fixture
def api_server(tmp_path: Path) -> Iterator[ApiServer]:
    """A running API server."""
    running = ApiServer(tmp_path)
    running.thread.start()
    yield running
    running.server.shutdown()
    running.thread.join()
    running.server.server_close()


class Routers:
    """A client whose routers say what they are told to, or are away."""

    def __init__(self, *executors: ExecutorCapacity) -> None:
        self.executors: tuple[ExecutorCapacity, ...] | None = executors
        self.rounds = threading.Semaphore(0)

    def capacity(self) -> Capacity:
        self.rounds.release()
        if self.executors is None:
            raise InflightError(grpc.StatusCode.UNAVAILABLE, "no route to host")
        return Capacity(self.executors, ())


def test_costs_follow_what_executors_hold_through_an_outage_of_the_routers(
    api_server: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    api_server.pods = {"a": {}, "b": {ANNOTATION: "900"}, "gone-soon": {}}
    routers, stopped = Routers(executor("a", 420), executor("b", 900), executor("deleted", 5)), threading.Event()
    health = LoopHealth(0.01)
    arguments = (cast(Client, routers), api_server.api, DEFAULT_SELECTOR, 0.01, stopped, health)
    thread = threading.Thread(target=follow, args=arguments)
    thread.start()
    try:
        # Given a first round
        assert api_server.patched.acquire(timeout=60)
        # When routers are away for some rounds, and come back with other figures
        routers.executors = None
        for _ in range(3):
            assert routers.rounds.acquire(timeout=60)
        assert health.reason("/ready") == "no router says what executors hold: UNAVAILABLE: no route to host"
        assert health.reason("/health") == ""
        routers.executors = (executor("a", 0), executor("b", 900))
        assert api_server.patched.acquire(timeout=60)
    finally:
        stopped.set()
        thread.join(60)
    # Then the costs are the newest, nothing else was touched, and the log has said why once
    assert api_server.pods == {"a": {ANNOTATION: "0"}, "b": {ANNOTATION: "900"}, "gone-soon": {}}
    assert set(api_server.selectors) == {DEFAULT_SELECTOR}
    assert len([record for record in caplog.records if "no route to host" in record.getMessage()]) == 1
    assert health.reason("/ready") == ""


def test_probes_see_a_loop_that_hangs_and_a_round_that_failed() -> None:
    now_s = 0.0
    health = LoopHealth(10.0, clock=lambda: now_s)
    port = bind("127.0.0.1:0")
    url = f"http://127.0.0.1:{port.getsockname()[1]}"

    def status(path: str) -> int:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{url}{path}", timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    with served(health, port):
        assert (status("/health"), status("/ready"), status("/")) == (200, 503, 404)
        health.round_ended("")
        assert (status("/health"), status("/ready")) == (200, 200)
        health.round_ended("GET pods: status 403")
        assert (status("/health"), status("/ready")) == (200, 503)
        now_s = 71.0
        assert (status("/health"), status("/ready")) == (503, 503)


def test_pod_that_is_gone_is_no_error_and_a_wrong_token_is(api_server: ApiServer, tmp_path: Path) -> None:
    assert api_server.api.set_cost("gone", 5) is False
    wrong = tmp_path / "wrong"
    wrong.write_text("x")
    with pytest.raises(KubernetesError, match="GET pods: status 401"):
        dataclasses.replace(api_server.api, token_file=wrong).costs(DEFAULT_SELECTOR)


def test_api_server_of_another_authority_is_not_spoken_to(api_server: ApiServer, tmp_path: Path) -> None:
    other = make_certificates(tmp_path / "other")
    with pytest.raises(KubernetesError, match="CERTIFICATE_VERIFY_FAILED"):
        dataclasses.replace(api_server.api, ca_file=other.ca_file).costs(DEFAULT_SELECTOR)


def test_api_is_found_as_a_pod_finds_it(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("llm\n")
    found = KubernetesApi.of_pod({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}, tmp_path)
    assert found == KubernetesApi("https://[fd00::1]:6443", "llm", tmp_path / "token", tmp_path / "ca.crt")
    with pytest.raises(KubernetesError, match="not in a pod"):
        KubernetesApi.of_pod({}, tmp_path)


@needs_kubectl
def test_selector_finds_executors_of_every_pool_and_nothing_else() -> None:
    wanted = dict(part.split("=") for part in DEFAULT_SELECTOR.split(","))
    for workload in overlay("multi-model").of_kind("Deployment", "StatefulSet"):
        is_executor = workload["metadata"]["name"].startswith("inflight-executor")
        assert matches({"matchLabels": wanted}, pod_labels(workload)) is is_executor
