"""Images built from the Dockerfile: what is in them, and the services of the Compose file as processes of them.

`tests/deploy/images.py` says what stands for what. The Compose file's services have loopback addresses of their own,
and Redis is a server of a wheel, with the Compose file's configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.utils import canonicalize_name

from inflight import AsyncClient
from inflight.aio_stream import AsyncStream
from inflight.common.guard import guarded
from inflight.common.version import installed_version
from inflight.events import Completion, Delta, FinishReason
from inflight.executor.native.library import INSTRUCTION_SETS
from inflight.local.redis_server import find_redis_binary
from tests.deploy.images import NEEDS_IMAGES, Container, Image, Mount, layer_sizes, servers_to_build
from tests.deploy.manifests import EVERYWHERE
from tests.unit.cli.test_fetch import WANTED, Store, fetched, store

__all__ = ["store"]  # a fixture

pytestmark = NEEDS_IMAGES

REPOSITORY = Path(__file__).parents[2]
SERVERS = servers_to_build()
needs_cuda_image = pytest.mark.skipif(
    "executor-cuda" not in SERVERS, reason="takes gigabytes: `make test-images CUDA=1`"
)
ROUTERS = ("127.3.0.1", "127.3.0.2")
EXECUTORS = ("127.3.0.3", "127.3.0.4")
GATEWAY = "127.3.0.5"
REDIS = "127.3.0.6"
MODEL = "smollm2-135m-instruct"
MAX_TOKENS = 64
SAMPLING: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": 7, "want_token_ids": True}
TIMEOUT_S = 240.0


@pytest.mark.parametrize("target", SERVERS)
def test_process_is_unprivileged_and_writes_to_its_temporary_folder_only(
    images: Mapping[str, Image], target: str
) -> None:
    script = "echo $$; id -u; id -G; touch /opt/inflight/a || touch /a || touch /tmp/a && grep NoNew /proc/self/status"
    ended = images[target].run("sh", "-c", script)
    assert ended.stdout.split() == ["1", "10001", "10001", "NoNewPrivs:", "1"]
    assert ended.stderr.count("Read-only file system") == 2
    assert images[target].run("inflight", "--version").stdout == f"inflight {installed_version()}\n"


@pytest.mark.parametrize("target", ["router", "gateway"])
def test_front_images_have_no_torch(images: Mapping[str, Image], target: str) -> None:
    packages = images[target].site_packages
    assert not any(packages.glob("torch*"))
    assert (packages / "transformers").is_dir()


@pytest.mark.parametrize("target", SERVERS)
def test_bill_of_materials_names_what_is_installed(images: Mapping[str, Image], target: str) -> None:
    found = metadata.distributions(path=[str(images[target].site_packages)])
    installed = {canonicalize_name(one.metadata["Name"]): one.version for one in found}
    bill = json.loads((REPOSITORY / "deploy" / "sbom" / f"{target}.cdx.json").read_text())
    assert {canonicalize_name(one["name"]): one["version"] for one in bill["components"]} == installed, (
        "run `make sbom`"
    )


@pytest.mark.usefixtures("images")
def test_router_image_is_small_to_pull() -> None:
    assert sum(layer_sizes("router", level=1)) < 250e6  # the fastest: as registries have it, it is smaller


def test_executor_image_has_kernels_and_no_compiler(images: Mapping[str, Image]) -> None:
    root = images["executor-cpu"].root
    # A build for each set of instructions, and the automaton of drafts.
    assert len(list(root.glob("opt/kernels/*.so"))) == len(INSTRUCTION_SETS) + 1
    assert not any(root.glob("usr/bin/*g++*"))


@pytest.mark.parametrize("source", ["s3://bucket/models/m", "hf://org/m@main"])
def test_model_download_fills_a_volume_from_its_image(
    images: Mapping[str, Image], store: Store, tmp_path: Path, source: str
) -> None:
    manifest = REPOSITORY / "deploy" / "kubernetes" / "components" / "model-download" / "download.yaml"
    (job,) = (one for one in yaml.safe_load_all(manifest.read_text()) if one["kind"] == "Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    os.chown(tmp_path, 0, pod["securityContext"]["fsGroup"])
    tmp_path.chmod(0o2775)
    target = container["args"][1]
    environment = {"AWS_ENDPOINT_URL": store.url, "HF_ENDPOINT": store.url}
    image = images[container["image"].removeprefix("inflight/")]
    command = [*container["command"], source, target]
    ended = image.run(*command, environment=environment, mounts=[Mount(tmp_path, str(Path(target).parent), "rw")])
    assert ended.returncode == 0, ended.stderr
    assert fetched(tmp_path / Path(target).name) == WANTED


def test_commands_of_operators_run_from_the_router_image(images: Mapping[str, Image]) -> None:
    made = images["router"].run("inflight", "kube-secrets", "--name", "llm.example.org")
    assert made.returncode == 0, made.stderr
    names = {secret["metadata"]["name"] for secret in json.loads(made.stdout)["items"]}
    assert {"inflight-redis", "inflight-router-tls", "inflight-executor-tls", "inflight-api-keys"} <= names
    costs = images["router"].run("inflight", "pod-costs")
    assert (costs.returncode, costs.stderr) == (2, "error: not in a pod: KUBERNETES_SERVICE_HOST is not set\n")


@needs_cuda_image
def test_gpu_executor_starts_up_to_the_gpu_that_it_lacks(images: Mapping[str, Image]) -> None:
    image = images["executor-cuda"]
    models = [Mount(images["models"].root / "models", "/models")]
    environment = {"INFLIGHT_MODEL": f"/models/{MODEL}", "INFLIGHT_DEVICE": "cuda", "INFLIGHT_INSECURE": "true"}
    started = image.run(*image.settings["Cmd"], environment=environment, mounts=models)
    assert started.returncode == 2
    assert started.stderr.splitlines()[-1] == "error: device 'cuda' is requested, but torch finds no GPU"
    found = image.run("inflight", "doctor", "--model", f"/models/{MODEL}", mounts=models)
    assert "torch" in found.stdout
    assert "Traceback" not in found.stdout + found.stderr


@needs_cuda_image
def test_gpu_executor_has_cuda_and_the_compiler_of_tritons_launchers(images: Mapping[str, Image]) -> None:
    image = images["executor-cuda"]
    versions = image.run(
        "python", "-c", "import torch, triton; print(torch.version.cuda, torch.backends.cudnn.version())"
    )
    assert versions.returncode == 0, versions.stderr
    assert "None" not in versions.stdout.split()
    assert image.run("sh", "-c", "echo 'int main(void) { return 0; }' | gcc -x c -o /tmp/a - && /tmp/a").returncode == 0


@dataclass(frozen=True, slots=True)
class Composed:
    """The services of the Compose file, started one by one in `folder`."""

    services: Mapping[str, Any]
    configs: Mapping[str, Any]
    images: Mapping[str, Image]
    folder: Path
    password: str

    def container(self, service: str, name: str, address: str) -> Container:
        """A container of a service; its health check is the Compose file's, else the image's."""
        described = self.services[service]
        image = self.images[described["build"]["target"]]
        environment = {key: self._mapped(str(value), address) for key, value in described["environment"].items()}
        if service == "executor":
            environment |= {"INFLIGHT_NUM_THREADS": "1", "INFLIGHT_MAX_TOKENS_IN_PAGED_KV_CACHE": "16384"}
        test = described.get("healthcheck", {}).get("test")
        health = [self._mapped(word, address) for word in (test[1:] if test else image.health_command)]
        health = [word.replace("//127.0.0.1:", f"//{address}:") for word in health]
        log = self.folder / f"{name}.log"
        return Container(name, image, environment, self.mounts(service), health, log)

    def make_certificates(self) -> None:
        """Runs the service that makes them."""
        mounts = self.mounts("certificates")
        for mount in mounts:  # a new volume belongs to whom the image's folder belongs
            mount.source.mkdir()
            os.chown(mount.source, 10001, 10001)
        ended = self.images["router"].run(*self.services["certificates"]["command"], mounts=mounts)
        assert ended.returncode == 0, ended.stderr

    def mounts(self, service: str) -> list[Mount]:
        """Its volumes: folders, and the models of their image."""
        found = []
        for volume in self.services[service]["volumes"]:
            source, target, *mode = self._mapped(volume, "").split(":")
            folder = self.images["models"].root / "models" if source == "models" else self.folder / source
            found.append(Mount(folder, target, *(mode or ["rw"])))
        return found

    @contextlib.asynccontextmanager
    async def redis(self) -> AsyncIterator[asyncio.subprocess.Process]:
        """A server with the configuration of the service."""
        users = self.folder / "users.acl"
        users.write_text(self._mapped(self.configs["redis-users"]["content"], ""))
        text = self._mapped(self.configs["redis"]["content"], REDIS)
        text = text.replace("/etc/redis/users.acl", str(users)).replace("dir /tmp", f"dir {self.folder}")
        process = await asyncio.create_subprocess_exec(
            *guarded([str(find_redis_binary()), "-"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # errors of the configuration
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(text.encode())
        process.stdin.close()
        said = b""
        async for line in process.stdout:
            said += line
            if b"ready to accept connections" in line.lower():
                break
        else:
            pytest.fail(f"Redis ended at its start:\n{said.decode()}")
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    def _mapped(self, text: str, address: str) -> str:
        """Variables at their defaults, and addresses of this machine in place of names."""
        names = {
            **dict.fromkeys(EVERYWHERE, address),
            "dns:///executor:50061": ",".join(f"{host}:50061" for host in EXECUTORS),
            "dns:///router:50051": ",".join(f"{host}:50051" for host in ROUTERS),
            "@redis:6379": f"@{REDIS}:6379",
        }
        text = re.sub(r"\$\{REDIS_PASSWORD[^}]*\}", self.password, text)
        text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
        for name, stands_for in names.items():
            text = text.replace(name, stands_for)
        return text


def complete_over_http() -> int:
    """Output tokens of a chat completion by the gateway."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Name a city."}],
        "max_tokens": 8,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"http://{GATEWAY}:8000/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=TIMEOUT_S) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


class Reading:
    """A stream that is being read."""

    def __init__(self, stream: AsyncStream) -> None:
        self.stream = stream
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async with contextlib.aclosing(self.stream.events()) as events:
                async for event in events:
                    if isinstance(event, Delta):
                        self.begun.set()
        finally:
            self.begun.set()


@dataclass(slots=True)
class Stack:
    """The system, whole, and what it answers undisturbed."""

    client: AsyncClient
    routers: list[Container]
    executors: list[Container]
    gateway: Container
    expected: tuple[int, ...] = ()

    async def begin(self) -> Reading:
        """A stream that has brought its first tokens and has more to come."""
        reading = Reading(self.client.generate("The city bus", timeout=TIMEOUT_S, **SAMPLING))
        await reading.begun.wait()
        return reading

    async def finish(self, *readings: Reading) -> None:
        """Each brings every token."""
        for reading in readings:
            await reading.task
            self.check(reading.stream.transcript.result())

    def check(self, done: Completion) -> None:
        """It is whole, and each token is the one that came undisturbed."""
        assert done.finish_reason is FinishReason.LENGTH
        assert tuple(done.token_ids) == self.expected

    async def restart(self, container: Container) -> None:
        """As a runtime does with what has ended."""
        await container.start()
        await container.wait_until_healthy()


async def test_services_of_compose_answer_and_survive_the_failure_of_each(
    images: Mapping[str, Image], tmp_path: Path
) -> None:
    text = yaml.safe_load((REPOSITORY / "deploy" / "compose.yaml").read_text())
    composed = Composed(text["services"], text["configs"], images, tmp_path, secrets.token_hex(12))
    composed.make_certificates()
    routers = [composed.container("router", f"router-{index}", host) for index, host in enumerate(ROUTERS)]
    executors = [composed.container("executor", f"executor-{index}", host) for index, host in enumerate(EXECUTORS)]
    gateway = composed.container("gateway", "gateway", GATEWAY)
    started = [*executors, *routers, gateway]
    addresses = [f"{host}:50051" for host in ROUTERS]
    authority = tmp_path / "authority" / "ca.pem"
    try:
        async with (
            composed.redis() as redis,
            AsyncClient(*addresses, ca_file=authority, server_name="inflight-router") as client,
        ):
            # Given the whole system
            for container in started:
                await container.start()
            for container in started:
                await container.wait_until_healthy()
            stack = Stack(client, routers, executors, gateway)
            stack.expected = tuple((await client.complete("The city bus", timeout=TIMEOUT_S, **SAMPLING)).token_ids)
            assert len(stack.expected) == MAX_TOKENS
            assert await asyncio.to_thread(complete_over_http) == 8
            await each_process_fails(stack)
            await redis_fails(stack, composed, redis)
            # And every process ends well when it is told to
            for container in (gateway, *routers, *executors):
                assert await container.end(signal.SIGTERM) == 0, container.log.read_text()
    finally:
        for container in started:
            await container.discard()


async def each_process_fails(stack: Stack) -> None:
    """Kills an executor, a router and the gateway; streams that run there bring the tokens that they would have."""
    reading = await stack.begin()
    assert reading.stream.transcript.executor_id is not None
    name = reading.stream.transcript.executor_id.partition(":")[0]
    (executor,) = (one for one in stack.executors if one.name == name)
    await executor.end(signal.SIGKILL)
    await stack.finish(reading)
    await stack.restart(executor)
    readings = [await stack.begin() for _ in range(4)]  # the client takes the routers in turn
    await stack.routers[0].end(signal.SIGKILL)
    await stack.finish(*readings)
    await stack.restart(stack.routers[0])
    await stack.gateway.end(signal.SIGKILL)
    await stack.restart(stack.gateway)
    assert await asyncio.to_thread(complete_over_http) == 8


async def redis_fails(stack: Stack, composed: Composed, redis: asyncio.subprocess.Process) -> None:
    """Kills Redis; a stream goes on without it, and an empty one serves new requests."""
    reading = await stack.begin()
    redis.kill()
    await redis.wait()
    await stack.finish(reading)
    async with composed.redis():
        for router in stack.routers:
            await router.wait_until_healthy()
        stack.check(await stack.client.complete("The city bus", timeout=TIMEOUT_S, **SAMPLING))
        assert await asyncio.to_thread(complete_over_http) == 8
