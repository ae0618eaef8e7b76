"""The overlays at work: their containers as processes of this machine (see kubelet.py), probed, asked, scaled under
load and drained."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import pytest
from redis.asyncio import Redis

from inflight import AsyncClient
from inflight.bench.fleet.tiny_model import write_tiny_model
from inflight.events import Completion, FinishReason
from tests.deploy.images import NEEDS_IMAGES, Image
from tests.deploy.kubelet import Node, Pod, addresses_of
from tests.deploy.manifests import OVERLAYS, WORKLOADS, Overlay, environment_of, needs_kubectl, overlay

pytestmark = needs_kubectl

ROUTERS = ("127.1.0.1", "127.1.0.2")
EXECUTORS = ("127.1.0.3", "127.1.0.4", "127.1.0.5")
GATEWAY = "127.1.0.6"
REDIS = ("127.1.0.7", "127.1.0.8", "127.1.0.9")
SENTINELS = ("127.1.0.10", "127.1.0.11", "127.1.0.12")
NO_SERVER = "127.1.0.13"
MODELS = ("smollm2-135m-instruct", "Qwen2.5-7B-Instruct", "small", "large")
TIMEOUT_S = 500.0
MAX_TOKENS = 24
NUM_CALLERS = 4
# Between a caller's requests: the callers share the cores with the executors that start.
PAUSE_S = 0.1


def names() -> dict[str, str]:
    """What stands for the names in the manifests."""
    single = {"inflight-redis:6379": f"{REDIS[0]}:6379"}
    for index, (redis, sentinel) in enumerate(zip(REDIS, SENTINELS, strict=True)):
        single[f"inflight-redis-{index}.inflight-redis"] = redis
        single[f"inflight-sentinel-{index}.inflight-sentinel"] = sentinel
    return single | {
        "dns:///inflight-executor:50061": addresses_of(EXECUTORS, 50061),
        "dns:///inflight-router:50051": addresses_of(ROUTERS, 50051),
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model under the name of every model of the overlays."""
    folder = tmp_path_factory.mktemp("models")
    tiny = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    for name in MODELS:
        shutil.copytree(tiny, folder / name)
    return folder


@pytest.fixture(params=["processes", pytest.param("images", marks=NEEDS_IMAGES)])
def images_used(request: pytest.FixtureRequest) -> Mapping[str, Image]:
    """The images from which containers run: none, or all that are ours."""
    return request.getfixturevalue("images") if request.param == "images" else {}


@asynccontextmanager
async def node(
    name: str, folder: Path, models: Path, images: Mapping[str, Image] = MappingProxyType({})
) -> AsyncIterator[Node]:
    """A node for an overlay, on which nothing is left at the end."""
    running = Node(overlay(name), folder, models, names(), images)
    try:
        yield running
    finally:
        await running.stop()


async def start_redis(on: Node) -> list[Pod]:
    """Every pod of Redis, and of Sentinel where there are any."""
    pods = []
    for component, addresses in (("redis", REDIS), ("sentinel", SENTINELS)):
        for workload in on.overlay.of_kind(*WORKLOADS):
            if workload["metadata"]["name"] != f"inflight-{component}":
                continue
            for index in range(workload["spec"]["replicas"]):
                pods.append(await on.start(workload, f"inflight-{component}-{index}", addresses[index]))
    return pods


def client_of(on: Overlay, folder: Path, routers: tuple[str, ...] = ROUTERS) -> AsyncClient:
    """A program in the cluster: it knows who signs the routers' certificates, and the routers' name."""
    ca_file = folder / "ca.crt"
    ca_file.write_bytes(on.content("Secret", "inflight-client-tls")["ca.crt"])
    addresses = (f"{host}:50051" for host in routers)
    return AsyncClient(*addresses, ca_file=ca_file, server_name="inflight-router", api_key=api_key_of(on))


def api_key_of(on: Overlay) -> str | None:
    """The operator's key, where the routers require one."""
    _, router = next(pair for pair in on.containers() if pair[1]["name"] == "router")
    if "INFLIGHT_API_KEYS_FILE" not in environment_of(on, router, {}):
        return None
    return on.content("Secret", "inflight-operator-key")["key"].decode()


async def ask(client: AsyncClient, model: str = "") -> Completion:
    return await client.complete(
        "the bus", max_tokens=MAX_TOKENS, ignore_eos=True, want_token_ids=True, model=model, timeout=TIMEOUT_S
    )


def complete_over_http() -> int:
    """Output tokens of a completion by the gateway, whose Service's port 80 is its port 8000."""
    body = {"model": MODELS[0], "prompt": "the bus", "max_tokens": MAX_TOKENS, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://{GATEWAY}:8000/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=TIMEOUT_S) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def is_whole(completion: Completion) -> bool:
    return completion.finish_reason is FinishReason.LENGTH and len(completion.token_ids) == MAX_TOKENS


# `example` is `gpu` with another name of the model; cpu-dev has a test of its own below.
@pytest.mark.parametrize("name", [name for name in OVERLAYS if name not in ("cpu-dev", "example")])
async def test_overlay_starts_is_probed_answers_and_ends(name: str, tmp_path: Path, models: Path) -> None:
    async with node(name, tmp_path, models) as on:
        # When a pod of each workload is started, as written, and Redis in full
        workloads = [w for w in on.overlay.of_kind("Deployment") if "executor" in w["metadata"]["name"]]
        executors = [
            await on.start(w, f"{w['metadata']['name']}-0", address)
            for w, address in zip(workloads, EXECUTORS, strict=False)
        ]
        redis = await start_redis(on)
        router = await on.start(on.overlay.workload("router"), "inflight-router-0", ROUTERS[0])
        gateway = await on.start(on.overlay.workload("gateway"), "inflight-gateway-0", GATEWAY)
        # Then each passes its probes
        for pod in (*redis, *executors, router, gateway):
            await pod.wait_until_ready()
        # And every model answers
        async with client_of(on.overlay, tmp_path, ROUTERS[:1]) as client:
            served = await client.list_models()
            assert len(served) == len(workloads)
            for model in served:
                assert is_whole(await ask(client, model.name))
        # And every process ends within its grace when it is told to
        for pod in (gateway, router, *executors):
            assert await pod.delete() == 0, pod.log.read_text()


async def test_replica_of_a_master_that_is_not_the_sentinels_fails_its_probe_and_is_right_after_a_restart(
    tmp_path: Path, models: Path
) -> None:
    async with node("ha", tmp_path, models) as on:
        pods = await start_redis(on)
        for pod in pods:
            await pod.wait_until_ready()
        replica = pods[1]
        password = on.overlay.content("Secret", "inflight-redis-server")["sentinel-password"].decode()
        async with Redis(host=replica.address, username="sentinel", password=password) as redis:
            # When a replica follows a server that is gone, as one that started during a failover does
            await redis.slaveof(NO_SERVER, 6379)
            # Then it has failed
            assert not await replica.probe("livenessProbe")
            # And neither have the others
            assert all([await pod.probe("livenessProbe") for pod in (pods[0], pods[2])])
            # And its successor follows the master
            await replica.restart()
            await replica.wait_until_ready()
            assert (await redis.info("replication"))["master_host"] == REDIS[0]


class Load:
    """Callers that ask one request after the other, and what came of them."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._stopped = asyncio.Event()
        self._progress = asyncio.Condition()
        self.num_done = 0
        self.failed: list[object] = []

    async def run(self) -> None:
        """Until it is stopped."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_CALLERS):
                tasks.create_task(self._call())

    def stop(self) -> None:
        """Every caller's request that is under way is its last."""
        self._stopped.set()

    async def done(self, num_more: int) -> None:
        """Returns when so many more requests have ended."""
        wanted = self.num_done + num_more
        async with self._progress:
            await self._progress.wait_for(lambda: self.num_done >= wanted)

    async def _call(self) -> None:
        while not self._stopped.is_set():
            try:
                completion = await ask(self._client)
            except Exception as error:
                self.failed.append(error)
            else:
                if not is_whole(completion):
                    self.failed.append(completion)
            await asyncio.sleep(PAUSE_S)
            self.num_done += 1
            async with self._progress:
                self._progress.notify_all()


async def wait_for_executors(client: AsyncClient, *pods: Pod, has_worked: bool = False) -> None:
    """Until the ledger knows exactly these, by their pods' names, as taking new work; or as having worked, too."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            found = {one.executor_id: one for one in (await client.capacity()).executors if one.accepting}
            if set(found) == {pod.name for pod in pods} and (
                not has_worked or all(one.num_steps for one in found.values())
            ):
                return
            await asyncio.sleep(0.1)


@pytest.mark.timeout(1200)  # ten processes start
async def test_cpu_dev_scales_from_one_to_three_and_drains_under_load_without_a_failed_request(
    tmp_path: Path, models: Path, images_used: Mapping[str, Image]
) -> None:
    async with node("cpu-dev", tmp_path, models, images_used) as on:
        # Given the overlay, with two routers as after `kubectl scale`
        executor_workload, router_workload = on.overlay.workload("executor"), on.overlay.workload("router")
        redis = await start_redis(on)
        routers = [
            await on.start(router_workload, f"inflight-router-{index}", host) for index, host in enumerate(ROUTERS)
        ]
        # A router is up and alive before it has an executor, and not ready
        await routers[0].wait_until("startupProbe")
        assert await routers[0].probe("livenessProbe")
        assert not await routers[0].probe("readinessProbe")
        executors = [await on.start(executor_workload, "inflight-executor-a", EXECUTORS[0])]
        gateway = await on.start(on.overlay.workload("gateway"), "inflight-gateway-0", GATEWAY)
        for pod in (*redis, *executors, *routers, gateway):
            await pod.wait_until_ready()
        assert await asyncio.to_thread(complete_over_http) == MAX_TOKENS
        async with client_of(on.overlay, tmp_path) as client, asyncio.TaskGroup() as tasks:
            load = Load(client)
            running = tasks.create_task(load.run())
            await load.done(5)
            # When two more executors come
            for letter, host in zip("bc", EXECUTORS[1:], strict=True):
                executors.append(await on.start(executor_workload, f"inflight-executor-{letter}", host))
            for pod in executors[1:]:
                await pod.wait_until_ready()
            await wait_for_executors(client, *executors, has_worked=True)
            # And the first is deleted, and then a router
            assert await executors[0].delete() == 0, executors[0].log.read_text()
            await wait_for_executors(client, *executors[1:])
            await load.done(20)
            assert await routers[0].delete() == 0, routers[0].log.read_text()
            await load.done(20)
            load.stop()
            await running
            assert await asyncio.to_thread(complete_over_http) == MAX_TOKENS
            # Then no client has noticed
            assert not load.failed, load.failed[:3]
            assert load.num_done >= 45
        for pod in (gateway, routers[1], *executors[1:]):
            assert await pod.delete() == 0, pod.log.read_text()
