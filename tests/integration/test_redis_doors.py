"""Real Sentinels and clusters: a master or node is killed, and requests are placed before and after."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import itertools
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from redis import Redis
from redis.exceptions import RedisError

from inflight.common.errors import RequestError
from inflight.common.guard import HAS_KERNEL_GUARD, guarded
from inflight.local.ports import free_ports
from inflight.local.redis_server import ACL_RULES, find_redis_binary
from inflight.router.config.tenants import Variant, choose_variant
from inflight.router.ledger.connection import connect, connect_reader
from inflight.router.ledger.keys import PoolKeys
from inflight.router.ledger.ledgers import Ledgers
from inflight.router.ledger.redis_ledger import RedisLedger
from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import (
    Attempt,
    Demand,
    ExecutorReport,
    HeldSequence,
    LedgerEvent,
    Placement,
    Queued,
)
from tests.support.stack.credentials import ec_key

START_TIMEOUT_S = 60.0
PASSWORD = "store-password"
ADMIN_PASSWORD = "admin-password"
NUM_SLOTS = 16384
MASTER = "the-master"


@dataclass(slots=True)
class Server:
    """A running server on a port of its own; `kill` leaves it no time to say goodbye."""

    port: int
    process: subprocess.Popen[bytes]

    def admin(self) -> Redis:
        """A client that may do everything."""
        return Redis(port=self.port, password=ADMIN_PASSWORD, decode_responses=True)

    def ask(self, *command: str | int) -> Any:
        """The reply to a command."""
        return self.admin().execute_command(*command)  # type: ignore[no-untyped-call]

    def kill(self) -> None:
        """Ends the process at once."""
        self.process.kill()
        self.process.wait()


def free_cluster_ports(count: int) -> list[int]:
    """Ports whose cluster ports, 10,000 above, are free and below the ephemeral range as well."""
    candidates = (port for port in free_ports("127.0.0.1", 30 * count) if port < 22_000 and _is_free(port + 10_000))
    return list(itertools.islice(candidates, count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def start(folder: Path, port: int, lines: str, *flags: str) -> Server:
    """Starts a server and waits until it answers. It keeps its configuration, as Sentinels and nodes must."""
    folder.mkdir(parents=True, exist_ok=True)
    configuration = folder / f"{port}.conf"
    if not configuration.exists():
        configuration.write_text(f"bind 127.0.0.1\nport {port}\ndir {folder}\n{lines}")
    command = [str(find_redis_binary()), str(configuration), *flags]
    output = folder / f"{port}.log"
    with output.open("ab") as log:
        process = subprocess.Popen(guarded(command) if HAS_KERNEL_GUARD else command, stdout=log, stderr=log)
    server = Server(port, process)

    def answers() -> bool:
        if process.poll() is not None:
            pytest.fail(f"Redis ended at its start:\n{output.read_text()}")
        return bool(server.admin().ping())

    until(answers)
    return server


def until(is_so: object) -> None:
    """Polls for a condition of servers that they do not announce."""
    assert callable(is_so)
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            if is_so():
                return
        except RedisError:
            pass  # not yet
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)


def users(password: str = PASSWORD) -> str:
    """The default user for the test and for servers among themselves; the least-privilege one for the store."""
    return (
        f"requirepass {ADMIN_PASSWORD}\nmasterauth {ADMIN_PASSWORD}\n"
        f'save ""\nappendonly no\nrepl-diskless-sync yes\nrepl-diskless-sync-delay 0\n'
        f"user inflight on >{password} {ACL_RULES}\n"
    )


@dataclass(slots=True)
class Watched:
    """A master, its replica, the Sentinel that watches them, and the URL for a router."""

    master: Server
    replica: Server
    sentinel: Server
    url: str

    def fail_over(self) -> None:
        """Replaces the master by the replica, and has the Sentinel say so. By itself a Sentinel replaces nothing for
        half a minute after a machine stood still for two seconds."""
        self.sentinel.ask("SENTINEL", "REMOVE", MASTER)
        self.sentinel.ask("SENTINEL", "MONITOR", MASTER, "127.0.0.1", self.replica.port, 1)
        self.sentinel.ask("SENTINEL", "SET", MASTER, "auth-pass", ADMIN_PASSWORD)
        self.sentinel.ask("SENTINEL", "SET", MASTER, "down-after-milliseconds", 60_000)
        self.replica.ask("REPLICAOF", "NO", "ONE")


@contextmanager
def sentinel_servers(folder: Path) -> Iterator[Watched]:
    """A master that a Sentinel replaces by its replica when it is told to: not because the machine stood still."""
    master_port, replica_port, sentinel_port = free_cluster_ports(3)
    watch = (
        f"requirepass {ADMIN_PASSWORD}\nsentinel monitor {MASTER} 127.0.0.1 {master_port} 1\n"
        f"sentinel auth-pass {MASTER} {ADMIN_PASSWORD}\nsentinel down-after-milliseconds {MASTER} 60000\n"
        f"sentinel failover-timeout {MASTER} 60000\n"
    )
    with ExitStack() as stack:
        master = start(folder, master_port, users())
        stack.callback(master.kill)
        lines = users() + f"replicaof 127.0.0.1 {master_port}\n"
        replica = start(folder, replica_port, lines)
        stack.callback(replica.kill)
        until(lambda: replica.admin().info("replication")["master_link_status"] == "up")
        sentinel = start(folder, sentinel_port, watch, "--sentinel")
        stack.callback(sentinel.kill)
        until(lambda: len(sentinel.ask("SENTINEL", "REPLICAS", MASTER)) == 1)
        hosts = f"127.0.0.1:1,127.0.0.1:{sentinel_port}"  # the first one is not there
        options = f"?sentinel_password={ADMIN_PASSWORD}"
        yield Watched(master, replica, sentinel, f"redis+sentinel://inflight:{PASSWORD}@{hosts}/{MASTER}/0{options}")


def _is_whole(node: Server) -> bool:
    found = node.admin().cluster("info")
    return (found["cluster_state"], found["cluster_slots_ok"]) == ("ok", str(NUM_SLOTS))


@contextmanager
def cluster_servers(folder: Path) -> Iterator[tuple[list[Server], str]]:
    """Three nodes that share the slots, and the URL for a router."""
    ports = free_cluster_ports(3)
    lines = users() + "cluster-enabled yes\ncluster-node-timeout 15000\ncluster-require-full-coverage no\n"
    with ExitStack() as stack:
        nodes = []
        for port in ports:
            nodes.append(start(folder, port, lines + f"cluster-config-file nodes-{port}.conf\n"))
            stack.callback(nodes[-1].kill)
        for index, node in enumerate(nodes):
            first, last = index * NUM_SLOTS // 3, (index + 1) * NUM_SLOTS // 3 - 1
            node.ask("CLUSTER", "ADDSLOTS", *range(first, last + 1))
            for other in nodes[:index]:
                node.ask("CLUSTER", "MEET", "127.0.0.1", other.port)
        for node in nodes:
            until(functools.partial(_is_whole, node))
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        yield nodes, f"redis+cluster://inflight:{PASSWORD}@{hosts}"


SETTINGS = LedgerSettings(
    call_timeout_ms=60_000,
    renew_interval_ms=50,
    reap_interval_ms=50,
    mailbox_block_ms=100,
    min_backoff_ms=5,
    max_backoff_ms=50,
)
POOL = "pool"


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with sentinel_servers(tmp_path_factory.mktemp("sentinel")) as servers:
        yield servers


@asynccontextmanager
async def two_routers(url: str, pool: str) -> AsyncIterator[tuple[RedisLedger, RedisLedger, list[LedgerEvent]]]:
    """Two routers' stores that run, and what the second is told, by its mailbox mostly."""
    clients = [connect(url, SETTINGS) for _ in range(2)]
    told: list[LedgerEvent] = []
    stores = [
        RedisLedger(clients[0], pool, "a", SETTINGS, lambda event: None, reader=connect_reader(url, SETTINGS)),
        RedisLedger(clients[1], pool, "b", SETTINGS, told.append, reader=connect_reader(url, SETTINGS)),
    ]
    async with asyncio.timeout(120):
        running = [asyncio.create_task(store.run()) for store in stores]
        yield stores[0], stores[1], told
        for task in running:
            task.cancel()
        await asyncio.wait(running)
    for client in clients:
        await client.aclose()


async def take_turns(a: RedisLedger, b: RedisLedger, told: list[LedgerEvent], name: str, generation: int) -> None:
    """A request of `a` is placed, one of `b` waits, and is placed, by `b`'s mailbox, when the first has ended."""
    await a.report(ExecutorReport("x", generation, 1, 10, 10, 1, accepting=True))
    first = await a.submit(Demand(f"{name}-1", 2, blocks=1))
    assert isinstance(first, Placement)
    assert isinstance(await b.submit(Demand(f"{name}-2", 2, blocks=1)), Queued)
    await a.settle([Attempt(f"{name}-1", first.attempt)])
    while not any(isinstance(event, Placement) and event.request_id == f"{name}-2" for event in told):
        await asyncio.sleep(0.01)
    await b.settle([Attempt(f"{name}-2", next(one.attempt for one in told if isinstance(one, Placement)))])
    told.clear()


async def test_routers_share_the_secret_that_one_of_them_puts_into_a_cluster(tmp_path: Path) -> None:
    with cluster_servers(tmp_path) as (_, url):
        first, second = Ledgers(url, "a", SETTINGS), Ledgers(url, "b", SETTINGS)
        assert await first.missing_commands() == []
        secret = await first.learn_secret(None)
        assert await second.learn_secret(None) == secret
        await first.aclose()
        await second.aclose()


async def until_answered(store: RedisLedger) -> None:
    """Renews until that is answered."""
    while True:
        try:
            await store.renew()
            return
        except RequestError:
            await asyncio.sleep(0.02)


async def test_requests_are_placed_before_and_after_sentinel_fails_the_master_over(watched: Watched) -> None:
    async with two_routers(watched.url, POOL) as (a, b, told):
        await take_turns(a, b, told, "before", 1)
        watched.master.kill()
        with pytest.raises(RequestError, match="does not answer"):
            await a.renew()
        await asyncio.to_thread(watched.fail_over)
        await until_answered(a)
        await until_answered(b)
        assert watched.replica.admin().info("replication")["role"] == "master"
        await take_turns(a, b, told, "after", 2)


async def test_pool_lives_on_one_node_of_a_cluster_and_is_found_where_it_moves(tmp_path: Path) -> None:
    with cluster_servers(tmp_path) as (nodes, url):
        async with two_routers(url, POOL) as (a, b, told):
            await take_turns(a, b, told, "before", 1)
            (home,) = [node for node in nodes if node.admin().dbsize()]
            assert all(name.startswith(PoolKeys(POOL).key("")) for name in home.ask("KEYS", "*"))
            # More calls at once than there are connections wait for one
            await asyncio.gather(*(a.explain(f"r{number}") for number in range(200)))
            # When its slot moves to another node, where neither its keys nor the scripts are
            _move(int(home.admin().cluster("keyslot", PoolKeys(POOL).key("executors"))), home, nodes)
            await take_turns(a, b, told, "moved", 2)
            (new_home,) = [node for node in nodes if node.admin().dbsize()]
            assert new_home is not home
            # When that node is killed and comes back empty
            new_home.kill()
            with pytest.raises(RequestError, match="does not answer"):
                await a.renew()
            restarted = start(tmp_path, new_home.port, "")
            try:
                await until_answered(a)
                await until_answered(b)
                await take_turns(a, b, told, "restarted", 3)
            finally:
                restarted.kill()


async def served(ledgers: Ledgers, name: str, demands: Sequence[Demand]) -> list[str]:
    """Returns the tenants in the order in which their requests get the only seat of a name."""
    told: list[LedgerEvent] = []
    store = ledgers.open(name, told.append)
    await store.report_all([ExecutorReport("x", 1, 1, 10, 10, 1, accepting=True)])
    outcomes = [await store.submit(demand) for demand in demands]
    tenant_of = {demand.request_id: demand.tenant for demand in demands}
    placed = [one for one in outcomes if isinstance(one, Placement)]
    tenants: list[str] = []
    while placed:
        seated = placed.pop()
        tenants.append(tenant_of[seated.request_id])
        held = (HeldSequence(seated.request_id, seated.attempt, 1),)
        await store.report_all([ExecutorReport("x", 1, len(tenants) + 1, 10, 10, 1, accepting=True, held=held)])
        await store.settle([Attempt(seated.request_id, seated.attempt)])
        placed += [one for one in told if isinstance(one, Placement)]
        told.clear()
    return tenants


def num_script_calls(node: Server) -> int:
    stats = node.admin().info("commandstats")
    calls: int = stats.get("cmdstat_fcall", {"calls": 0})["calls"]
    return calls


async def test_two_names_of_a_model_halve_the_load_of_a_node_and_are_fair_each(tmp_path: Path) -> None:
    """The example of docs/operations.md: the sessions of one variant name use two nodes of a cluster."""
    variants = [Variant("llama-0", 1.0), Variant("llama-2", 1.0)]
    by_name: dict[str, list[Demand]] = {variant.model: [] for variant in variants}
    for number, tenant in enumerate(["flood"] * 120 + ["calm"] * 60):
        name = choose_variant(variants, f"session {number}").model
        by_name[name].append(Demand(f"r{number}", 2, 1, tenant=tenant, prompt_tokens=8, max_tokens=8))
    with cluster_servers(tmp_path) as (nodes, url):
        ledgers = Ledgers(url, "a", SETTINGS)
        orders = [await served(ledgers, name, demands) for name, demands in by_name.items()]
        await ledgers.aclose()
        homes = {name: [node for node in nodes if _has_keys_of(node, name)] for name in by_name}
        calls = sorted(num_script_calls(node) for node in nodes)
    ((first,), (second,)) = homes.values()
    assert first is not second
    assert calls[-1] < 0.6 * sum(calls)
    for order, demands in zip(orders, by_name.values(), strict=True):
        assert len(order) == len(demands)
        num_calm = order.count("calm")
        assert abs(order[: 2 * num_calm].count("calm") - num_calm) <= 2  # half, until the calm tenant has no more


def _has_keys_of(node: Server, name: str) -> bool:
    return any(key.startswith(PoolKeys(name).key("")) for key in node.ask("KEYS", "*"))


def _move(slot: int, home: Server, nodes: list[Server]) -> None:
    """Empties the slot and gives it to another node. No node asks for it meanwhile: who comes is told CLUSTERDOWN."""
    other = next(node for node in nodes if node is not home)
    new_id = other.ask("CLUSTER", "MYID")
    home.admin().flushall()
    for node in (other, home, *nodes):
        node.ask("CLUSTER", "SETSLOT", slot, "NODE", new_id)


class Tunnel:
    """Ends TLS in front of a Redis that speaks none."""

    def __init__(self, redis_port: int) -> None:
        self._redis_port = redis_port
        self.num_accepted = 0

    async def serve(self, client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        """Passes on what comes from one side to the other."""
        self.num_accepted += 1
        replies, commands = await asyncio.open_connection("127.0.0.1", self._redis_port)
        await asyncio.gather(_pass_on(client, commands), _pass_on(replies, answers))


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while received := await source.read(1 << 16):
            target.write(received)
            await target.drain()
    target.close()


async def test_store_speaks_tls_and_only_to_who_has_the_right_certificate(redis_url: str, tmp_path: Path) -> None:
    authority, strangers = tmp_path / "ca.pem", tmp_path / "other.pem"
    certificate = write_certificate(tmp_path / "server.pem", authority)
    write_certificate(tmp_path / "stranger.pem", strangers)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    user, _, address = redis_url.removeprefix("redis://").partition("@")
    tunnel = Tunnel(int(address.partition(":")[2].partition("/")[0]))
    server = await asyncio.start_server(tunnel.serve, "127.0.0.1", 0, ssl=context)
    url = f"rediss://{user}@127.0.0.1:{server.sockets[0].getsockname()[1]}/0?ssl_ca_certs="
    trusting, doubting = connect(f"{url}{authority}", SETTINGS), connect(f"{url}{strangers}", SETTINGS)

    assert await RedisLedger(trusting, "tls", "a", SETTINGS, print).explain("r") is None
    with pytest.raises(RequestError, match="does not answer"):
        await RedisLedger(doubting, "tls", "a", SETTINGS, print).explain("r")
    assert tunnel.num_accepted == 1

    await trusting.aclose()
    await doubting.aclose()
    server.close()
    await server.wait_closed()


def write_certificate(path: Path, authority_path: Path) -> Path:
    """A certificate of 127.0.0.1 with its key, and the certificate of who signed it: itself."""
    key = ec_key()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, path.stem)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    private, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.write_bytes(pem + key.private_bytes(serialization.Encoding.PEM, private, plain))
    authority_path.write_bytes(pem)
    return path
