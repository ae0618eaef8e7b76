"""Pods of a rendered overlay as processes of this machine: their commands, arguments, environment, files and probes as
the manifests say, and deleted as a kubelet deletes them.

What stands for what, and nothing else differs:

    pod IP                          a loopback address of the pod's own, 127.1.0.N, with the manifest's ports
    [::], of Redis * -::*           the pod's address
    a Service's or pod's name       the addresses of its pods, those that will be started later, too
    Secret, ConfigMap, emptyDir     folders of the pod's own; paths in values and in ConfigMaps' files follow
    models on a claim               a folder with a tiny model under the name that the overlay gives it
    models from an image            the same folder as /models of the image, whose root is the volume
    inflight, valkey-server         this repository; the Redis of this machine
    an image, where there are any   a root file system of the image, see `images.py`; mounts, user and files' modes as
                                    the manifest says, and the models of their own image
    cuda                            cpu, one thread, and a KV pool of 16,384 tokens where nothing is set
    period of a probe               as soon as the one before has an answer; failureThreshold counts for running pods
    preStop sleep                   nothing: who calls is told before the pod is deleted, as after such a sleep
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inflight.common.disk_cache import CACHE_VARIABLE, cache_folder
from inflight.common.guard import guarded
from inflight.local.redis_server import find_redis_binary
from tests.deploy.images import Image, Mount, first_process
from tests.deploy.manifests import EVERYWHERE, Object, Overlay, environment_of, expanded

REPOSITORY = Path(__file__).parents[2]
START_TIMEOUT_S = 500.0
PROBE_RETRY_S = 0.1
SMALL_KV_TOKENS = 16_384
VALKEY_CLI = Path(__file__).with_name("valkey_cli.py")
REPLACED_WORDS = {"inflight": (sys.executable, "-m", "inflight.cli.main")}


@dataclass(slots=True)
class Pod:
    """A pod that has been started. `address` is its IP."""

    name: str
    address: str
    spec: Object
    log: Path
    image: Image | None = None
    process: asyncio.subprocess.Process | None = None
    # Starts a command with the files and the environment of its container.
    run: Callable[[Sequence[str]], Awaitable[asyncio.subprocess.Process]] | None = None

    @property
    def container(self) -> Object:
        """Its container; ours have one."""
        (container,) = self.spec["containers"]
        return dict(container)

    @property
    def fields(self) -> Mapping[str, str]:
        """What its containers may read of it by `fieldRef`."""
        return {"metadata.name": self.name, "status.podIP": self.address}

    async def probe(self, kind: str) -> bool:
        """Probes once, as a kubelet does: over the pod's address, in the clear, or by a command in the container."""
        probe = self.container[kind]
        timeout_s = 60.0  # not the manifest's: what it says of time would be about this machine
        if "exec" in probe:
            assert self.run is not None
            return await (await self.run(probe["exec"]["command"])).wait() == 0
        if "grpc" in probe:
            return await _grpc_serves(
                f"{self.address}:{probe['grpc']['port']}", probe["grpc"].get("service", ""), timeout_s
            )
        action = probe.get("httpGet") or probe["tcpSocket"]
        ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        port = ports.get(action["port"], action["port"])
        return await _answers(self.address, int(port), action.get("path"), timeout_s)

    async def wait_until(self, kind: str) -> None:
        """Returns when a probe succeeds; fails where the pod ends before."""
        assert self.process is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            while not await self.probe(kind):
                assert self.process.returncode is None, f"{self.name} ended:\n{self.log.read_text()}"
                await asyncio.sleep(PROBE_RETRY_S)

    async def wait_until_ready(self) -> None:
        """As a kubelet: readiness and liveness count once the startup probe has succeeded."""
        await self.wait_until("startupProbe")
        assert await self.probe("livenessProbe")
        await self.wait_until("readinessProbe")

    async def delete(self) -> int:
        """SIGTERM, and its exit code within the pod's grace; its end after that is a failure."""
        assert self.process is not None
        os.kill(self.process.pid if self.image is None else first_process(self.process.pid), signal.SIGTERM)
        try:
            async with asyncio.timeout(self.spec["terminationGracePeriodSeconds"]):
                return await self.process.wait()
        finally:
            self.kill()

    async def restart(self) -> None:
        """Starts its container, as a kubelet does after a failed liveness probe: what was running ends at once."""
        self.kill()
        if self.process is not None:
            await self.process.wait()
        assert self.run is not None
        container = self.container
        self.process = await self.run([*container["command"], *container.get("args", ())])

    def kill(self) -> None:
        """Ends it at once, if it has not ended."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()


@dataclass(slots=True)
class Node:
    """Starts the pods of one overlay. `names` says which addresses stand for a name with its port, or without one.
    Containers whose images are among `images`, by their targets, run from these."""

    overlay: Overlay
    folder: Path
    models: Path
    names: Mapping[str, str]
    images: Mapping[str, Image] = field(default_factory=dict)
    pods: list[Pod] = field(default_factory=list)

    async def start(self, workload: Object, name: str, address: str) -> Pod:
        """Starts a pod of the workload under this name, its init containers first."""
        spec = workload["spec"]["template"]["spec"]
        home = self.folder / name
        pod = Pod(name, address, spec, self.folder / f"{name}.log")
        pod.image = self._image_of(pod.container)
        volumes = {volume["name"]: self._make(volume, home / volume["name"], pod) for volume in spec.get("volumes", ())}
        for container in spec.get("initContainers", ()):
            process = await self._run(container, pod, volumes)
            assert await process.wait() == 0, pod.log.read_text()

        async def run(command: Sequence[str]) -> asyncio.subprocess.Process:
            return await self._run({**pod.container, "command": command, "args": ()}, pod, volumes)

        pod.run = run
        await pod.restart()
        self.pods.append(pod)
        return pod

    async def stop(self) -> None:
        """Ends what has not ended."""
        for pod in self.pods:
            pod.kill()
        for pod in self.pods:
            assert pod.process is not None
            await pod.process.wait()

    def _image_of(self, container: Object) -> Image | None:
        found = re.fullmatch(r"inflight/([\w-]+):.*", container["image"])
        return None if found is None else self.images.get(found[1])

    def _make(self, volume: Object, folder: Path, pod: Pod) -> Path:
        """The folder that stands for a volume."""
        if "persistentVolumeClaim" in volume:
            return self.models
        folder.mkdir(parents=True)
        if "image" in volume:
            (folder / "models").symlink_to(self.models)
        if pod.image is not None and "emptyDir" in volume:
            os.chown(folder, -1, pod.spec["securityContext"]["fsGroup"])
            folder.chmod(0o2777)
        if "secret" in volume:
            content = self.overlay.content("Secret", volume["secret"]["secretName"])
            wanted = {item["key"]: item["path"] for item in volume["secret"].get("items", ())} or {
                key: key for key in content
            }
            for key, path in wanted.items():
                (folder / path).write_bytes(content[key])
                if pod.image is not None:
                    os.chown(folder / path, -1, pod.spec["securityContext"]["fsGroup"])
                    (folder / path).chmod(volume["secret"]["defaultMode"])
        elif "configMap" in volume:
            for key, value in self.overlay.content("ConfigMap", volume["configMap"]["name"]).items():
                (folder / key).write_text(self._mapped(value.decode(), pod))
        return folder

    async def _run(self, container: Object, pod: Pod, volumes: Mapping[str, Path]) -> asyncio.subprocess.Process:
        if (image := self._image_of(container)) is not None:
            return await self._run_image(image, container, pod, volumes)
        environment = {
            name: self._mapped(value, pod, container, volumes)
            for name, value in environment_of(self.overlay, container, pod.fields).items()
        }
        words = [expanded(word, environment) for word in (*container["command"], *container.get("args", ()))]
        program, *arguments = (self._mapped(word, pod, container, volumes) for word in words)
        command = [*REPLACED_WORDS.get(program, (program,)), *arguments]
        return await _start(command, pod, _image_environment(self.folder) | _of_this_machine(container, environment))

    async def _run_image(
        self, image: Image, container: Object, pod: Pod, volumes: Mapping[str, Path]
    ) -> asyncio.subprocess.Process:
        """Runs a container from its image, with the manifest's user, mounts and paths."""
        security, names = pod.spec["securityContext"], {**self.names, **dict.fromkeys(EVERYWHERE, pod.address)}
        assert image.settings["User"] == f"{security['runAsUser']}:{security['runAsGroup']}"
        environment = {
            name: _replaced(value, names) for name, value in environment_of(self.overlay, container, pod.fields).items()
        }
        words = [
            _replaced(expanded(word, environment), names)
            for word in (*container["command"], *container.get("args", ()))
        ]
        mounts = [
            Mount(_mounted(volumes, mount).resolve(), mount["mountPath"], "ro" if mount.get("readOnly") else "rw")
            for mount in container["volumeMounts"]
        ]
        command = image.command(words, _of_this_machine(container, environment), mounts, pod.name)
        return await _start(command, pod, None)

    def _mapped(
        self, text: str, pod: Pod, container: Object | None = None, volumes: Mapping[str, Path] | None = None
    ) -> str:
        """A value in the terms of this machine. In one pass: what has been put in is not looked at again."""
        replaced = {**self.names, **dict.fromkeys(EVERYWHERE, pod.address)}
        if container is None:  # a file of a ConfigMap, which the pod's only container reads
            container = pod.container
        for mount in container.get("volumeMounts", ()):
            folder = pod.log.parent / pod.name / mount["name"] if volumes is None else _mounted(volumes, mount)
            replaced[mount["mountPath"]] = str(folder)
        if container is not pod.container and "/models" not in {
            mount["mountPath"] for mount in container["volumeMounts"]
        }:
            replaced["/models"] = str(self.models)  # of the init container's own image
        return _replaced(text, replaced)


def _mounted(volumes: Mapping[str, Path], mount: Object) -> Path:
    """Returns the part of a volume that a container sees."""
    return volumes[mount["name"]].joinpath(mount.get("subPath", ""))


def _replaced(text: str, replaced: Mapping[str, str]) -> str:
    """Returns the text with words replaced by others. Not within a longer word: `/tmp` is not in `/tmpfile`, a Service
    not in its namesake's name."""
    longest_first = sorted(replaced, key=len, reverse=True)
    pattern = "|".join(rf"(?<![\w.-]){re.escape(word)}(?![\w-])" for word in longest_first)
    return re.sub(pattern, lambda found: replaced[found[0]], text)


async def _start(command: Sequence[str], pod: Pod, environment: Mapping[str, str] | None) -> asyncio.subprocess.Process:
    with pod.log.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *guarded(list(command)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )


def _image_environment(folder: Path) -> dict[str, str]:
    """What the image brings: the programs, a home, and kernels that are built."""
    programs = folder / "bin"
    if not programs.exists():
        programs.mkdir()
        (programs / "valkey-server").symlink_to(find_redis_binary())
        client = programs / "valkey-cli"
        if found := shutil.which("valkey-cli") or shutil.which("redis-cli"):
            client.symlink_to(found)
        else:
            client.write_text(f'#!/bin/sh\nexec {sys.executable} {VALKEY_CLI} "$@"\n')
            client.chmod(0o755)
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "HOME": str(folder),
        CACHE_VARIABLE: str(cache_folder()),
    }


def _of_this_machine(container: Object, environment: Mapping[str, str]) -> dict[str, str]:
    """An executor's environment, without a GPU and for a few cores."""
    if container["command"][:2] != ["inflight", "executor"]:
        return dict(environment)
    small = {"INFLIGHT_NUM_THREADS": "1", "INFLIGHT_MAX_TOKENS_IN_PAGED_KV_CACHE": str(SMALL_KV_TOKENS)}
    return small | dict(environment) | {"INFLIGHT_DEVICE": "cpu"}


async def _grpc_serves(address: str, service: str, timeout_s: float) -> bool:
    async with grpc.aio.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _answers(host: str, port: int, path: str | None, timeout_s: float) -> bool:
    """Whether a connection is taken, and with a path whether a GET is answered well."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                if path is None:
                    return True
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                status = (await reader.readline()).split()
                return len(status) > 1 and 200 <= int(status[1]) < 400
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


def addresses_of(hosts: Sequence[str], port: int) -> str:
    """What stands for `dns:///name:port`."""
    return ",".join(f"{host}:{port}" for host in hosts)
