"""TLS of routers and executors: which peers are accepted, and the effect of changed certificates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inflight.common.protocol import PROTOCOL_VERSION
from inflight.common.rpc.server import GrpcServer
from inflight.common.rpc.tls import TlsFiles, TlsPaths
from inflight.common.settings import load
from inflight.executor.serving.router_auth import PeerNameCheck, load_server_tls
from inflight.executor.settings import ExecutorSettings
from inflight.local.certificates import EXECUTOR_NAME, ROUTER_NAME, CertificateFolder, make_certificates
from inflight.router.executors.channel import ExecutorChannels
from inflight.router.executors.link import ExecutorLink, LinkEvents
from inflight.router.lifecycle.events import LinkEvent
from inflight.router.settings import RouterSettings
from inflight.router.stream.request_stream import RequestStream
from inflight.v1 import executor_pb2, executor_pb2_grpc

SERVICE = "inflight.v1.ExecutorService"
NUM_BLOCKS = 8
SERVING = health_pb2.HealthCheckResponse.SERVING


class Executor(executor_pb2_grpc.ExecutorServiceServicer):
    """Describes itself, and on a `Serve` stream sends reports when told to."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[executor_pb2.Report] = asyncio.Queue()
        self.num_describes = 0

    async def Describe(self, request: Any, context: Any) -> executor_pb2.DescribeResponse:
        self.num_describes += 1
        return executor_pb2.DescribeResponse(
            executor_id="e",
            generation=1,
            protocol_version=PROTOCOL_VERSION,
            block_size=4,
            total_blocks=NUM_BLOCKS,
            max_num_sequences=2,
            context_length=64,
            vocabulary_size=5,
        )

    async def Serve(self, requests: Any, context: Any) -> AsyncIterator[executor_pb2.ServeResponse]:
        while True:
            report = await self.reports.get()
            report.total_blocks = NUM_BLOCKS
            yield executor_pb2.ServeResponse(generation=1, report=report)


class Observer:
    """Remembers what a link tells."""

    def __init__(self) -> None:
        self.seqs: asyncio.Queue[int] = asyncio.Queue()
        self.broke = asyncio.Event()

    def on_breach(self, link: ExecutorLink) -> None:
        pass

    def on_linked(self, link: ExecutorLink) -> LinkEvents:
        return self

    def on_unlinked(self, link: ExecutorLink, streams: Sequence[RequestStream]) -> None:
        self.broke.set()

    def on_request(self, link: ExecutorLink, stream: RequestStream, event: LinkEvent) -> None:
        raise AssertionError("nothing was submitted")

    def on_report(self, link: ExecutorLink, report: executor_pb2.Report) -> None:
        self.seqs.put_nowait(report.seq)

    def on_usage(self, link: ExecutorLink, usage: executor_pb2.UsageReport) -> None:
        raise AssertionError("nothing was used")


@asynccontextmanager
async def executor_behind(
    door: TlsFiles | None, names: tuple[str, ...] = (ROUTER_NAME,)
) -> AsyncIterator[tuple[str, Executor, GrpcServer]]:
    servicer = Executor()
    server = GrpcServer([SERVICE], tls=door, check_peer=PeerNameCheck(names).check)
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, server.grpc)
    address = await server.start("127.0.0.1:0")
    await server.set_serving(True)
    try:
        yield address, servicer, server
    finally:
        await server.stop(0)


def arguments_of(settings: dict[str, str]) -> list[str]:
    return [word for setting in settings.items() for word in setting]


def door_of(made: CertificateFolder) -> TlsFiles:
    door = load_server_tls(load(ExecutorSettings, "inflight executor", arguments_of(made.executor_settings())))
    assert door is not None
    return door


def channels_of(made: CertificateFolder) -> ExecutorChannels:
    return ExecutorChannels.of(load(RouterSettings, "inflight router", arguments_of(made.router_settings())))


def replace(old: CertificateFolder, new: CertificateFolder) -> None:
    for there, comes in zip(old.files, new.files, strict=True):
        comes.replace(there)


async def describe(channel: grpc.aio.Channel) -> grpc.StatusCode:
    """How a call of `Describe` ends."""
    try:
        stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
        await stub.Describe(executor_pb2.DescribeRequest(), timeout=60)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def channel_as(made: CertificateFolder, role: str, address: str, *, name: str = EXECUTOR_NAME) -> grpc.aio.Channel:
    """A channel that shows the certificate of a role and wants to see `name`."""
    tls = TlsFiles.open(TlsPaths(made.certificate(role), made.key(role), made.ca_file))
    options = [("grpc.ssl_target_name_override", name)]
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)


async def test_only_a_router_of_the_authority_is_let_in_by_an_executor(tmp_path: Path) -> None:
    made, strange = make_certificates(tmp_path / "1"), make_certificates(tmp_path / "2")
    async with executor_behind(door_of(made)) as (address, servicer, _):
        # The router's certificate
        async with channel_as(made, "router", address) as channel:
            assert await describe(channel) is grpc.StatusCode.OK
        # One of the same authority that is no router's
        async with channel_as(made, "executor", address) as channel:
            assert await describe(channel) is grpc.StatusCode.PERMISSION_DENIED
            health: Any = health_pb2_grpc.HealthStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="PERMISSION_DENIED"):
                await health.Check(health_pb2.HealthCheckRequest())
            stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="PERMISSION_DENIED"):
                await stub.Serve(iter([executor_pb2.ServeRequest()])).read()
        # A router's of an authority that is not known here; none; and none in the clear
        mixed = grpc.ssl_channel_credentials(
            made.ca_file.read_bytes(), strange.key("router").read_bytes(), strange.certificate("router").read_bytes()
        )
        uncertified = grpc.ssl_channel_credentials(made.ca_file.read_bytes())
        options = [("grpc.ssl_target_name_override", EXECUTOR_NAME)]
        for channel in (
            grpc.aio.secure_channel(address, mixed, options=options),
            grpc.aio.secure_channel(address, uncertified, options=options),
            grpc.aio.insecure_channel(address),
        ):
            async with channel:
                assert await describe(channel) is grpc.StatusCode.UNAVAILABLE
        assert servicer.num_describes == 1


async def test_router_refuses_an_executor_of_another_name_or_authority(tmp_path: Path) -> None:
    made, strange = make_certificates(tmp_path / "1"), make_certificates(tmp_path / "2")
    async with executor_behind(door_of(made)) as (address, _, _):
        async with channel_as(made, "router", address, name="another.example") as channel:
            assert await describe(channel) is grpc.StatusCode.UNAVAILABLE
        async with channels_of(strange).open(address, []) as channel:
            assert await describe(channel) is grpc.StatusCode.UNAVAILABLE
        async with channels_of(made).open(address, []) as channel:
            assert await describe(channel) is grpc.StatusCode.OK


async def test_router_is_known_by_a_uri_as_well(tmp_path: Path) -> None:
    uri = "spiffe://example.org/ns/llm/sa/router"
    made = make_certificates(tmp_path, names=["localhost", uri])
    async with (
        executor_behind(door_of(made), names=("other", uri)) as (address, _, _),
        channel_as(made, "router", address) as channel,
    ):
        assert await describe(channel) is grpc.StatusCode.OK


async def test_probes_ask_in_the_clear_on_a_port_of_their_own(tmp_path: Path) -> None:
    async with executor_behind(door_of(make_certificates(tmp_path))) as (_, _, server):
        health_address = await server.start_health("127.0.0.1:0")
        async with grpc.aio.insecure_channel(health_address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE))).status == SERVING
            # Nothing else is there.
            assert await describe(channel) is grpc.StatusCode.UNIMPLEMENTED


async def test_rotation_shows_new_certificates_while_an_open_stream_goes_on(tmp_path: Path) -> None:
    # Given a stream over the certificates of one authority
    made = make_certificates(tmp_path / "1")
    old = CertificateFolder(tmp_path / "old")
    old.folder.mkdir()
    for path in made.files:
        (old.folder / path.name).write_bytes(path.read_bytes())
    door = door_of(made)
    async with executor_behind(door) as (address, servicer, _), channel_as(old, "router", address) as channel:
        stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
        stream = stub.Serve(iter([executor_pb2.ServeRequest()]))
        servicer.reports.put_nowait(executor_pb2.Report(seq=1))
        assert (await stream.read()).report.seq == 1
        # When authority and certificates are replaced
        replace(made, make_certificates(tmp_path / "2"))
        door.look()
        # Then who comes later meets the new ones, on both sides
        async with channel_as(made, "router", address) as new:
            assert await describe(new) is grpc.StatusCode.OK
        async with channel_as(old, "router", address) as refused:
            assert await describe(refused) is grpc.StatusCode.UNAVAILABLE
        # And the stream goes on
        servicer.reports.put_nowait(executor_pb2.Report(seq=2))
        assert (await stream.read()).report.seq == 2
        stream.cancel()


async def test_link_goes_on_through_a_rotation_and_comes_back_with_the_new_certificates(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "1")
    channels, observer = channels_of(made), Observer()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        # Given a link
        async with executor_behind(door_of(made)) as (address, servicer, _):
            link = ExecutorLink(address, "r", observer, channels)
            running = tasks.create_task(link.run())
            servicer.reports.put_nowait(executor_pb2.Report(seq=1))
            assert await observer.seqs.get() == 1
            # When everything is replaced, the stream goes on
            replace(made, make_certificates(tmp_path / "2"))
            assert channels.tls is not None
            channels.tls.look()
            servicer.reports.put_nowait(executor_pb2.Report(seq=2))
            assert await observer.seqs.get() == 2
        await observer.broke.wait()
        # Then the executor comes back on the same address with the new certificates, and the link with it
        server = GrpcServer([SERVICE], tls=door_of(made), check_peer=PeerNameCheck([ROUTER_NAME]).check)
        executor_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, server.grpc)
        await server.start(address)
        servicer.reports.put_nowait(executor_pb2.Report(seq=3))
        assert await observer.seqs.get() == 3
        running.cancel()
        await server.stop(0)


async def test_client_port_shows_its_certificate_and_asks_for_none(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    tls = TlsFiles.open(TlsPaths(made.certificate("router"), made.key("router")))
    server = GrpcServer([], tls=tls)
    address = await server.start("127.0.0.1:0")
    await server.set_serving(True)
    trusting = grpc.ssl_channel_credentials(made.ca_file.read_bytes())
    async with grpc.aio.secure_channel(address, trusting) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)).status == SERVING
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    await server.stop(0)
