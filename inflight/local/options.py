"""What a local stack consists of, and the command lines of its processes. Plain data; starts nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.machine import num_usable_cores
from inflight.local.certificates import CertificateFolder

# Servers end their streams within this time on SIGTERM, before the stack stops asking.
DRAIN_TIMEOUT_S = 5.0
STOP_GRACE_S = 10.0

# Whatever address clients use: executors of a local stack are reached by its routers alone, and HTTP is in the clear.
LOOPBACK_HOST = "127.0.0.1"

DEFAULT_RUN_DIR = Path("run")


@dataclass(frozen=True, slots=True)
class StackOptions:
    """A local stack: a private Redis, `executors`, `routers` and `gateways` processes.

    `port` is the first router's, `http_port` that of its metrics and board, `gateway_port` the first gateway's; every
    other port, and these where they are `None`, is a free one. `redis_url` uses a Redis that runs already. The extra
    arguments are flags of `inflight executor`, `inflight router` and `inflight gateway`. Loading the model, and the
    first time compiling the attention op, must fit into `start_timeout_s`. `program` runs the roles. With `tls` routers
    are reached by TLS and executors by mutual TLS, with certificates that are made in the run folder at every start.
    """

    executors: int = 1
    routers: int = 1
    gateways: int = 0
    model: str | None = None
    executor_args: tuple[str, ...] = ()
    router_args: tuple[str, ...] = ()
    gateway_args: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int | None = None
    http_port: int | None = None
    gateway_port: int | None = None
    redis_url: str | None = None
    run_dir: Path = DEFAULT_RUN_DIR
    start_timeout_s: float = 600.0
    tls: bool = False
    program: tuple[str, ...] = (sys.executable, "-m", "inflight.cli.main")

    @property
    def certificates(self) -> CertificateFolder | None:
        """Where the stack's certificates are; None without `tls`."""
        return CertificateFolder(self.run_dir / "certificates") if self.tls else None

    def __post_init__(self) -> None:
        for name in ("executors", "routers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.gateways < 0:
            raise ValueError(f"gateways must be at least 0, not {self.gateways}")
        for name in ("port", "http_port", "gateway_port"):
            port = getattr(self, name)
            if port is not None and not 1 <= port <= 65535:
                raise ValueError(f"{name} must be between 1 and 65535, not {port}")

    @property
    def names_with_chosen_ports(self) -> frozenset[str]:
        """The processes of which a port was asked for: another port will not do."""
        router = {"router-0"} if self.port is not None or self.http_port is not None else set()
        gateway = {"gateway-0"} if self.gateway_port is not None else set()
        return frozenset(router | gateway)


def executor_command(options: StackOptions, name: str, address: str, http_address: str = "") -> list[str]:
    """The command line of one executor."""
    model = [] if options.model is None else ["--model", options.model]
    common = ["--listen", address, "--executor-id", name, "--drain-timeout-s", str(DRAIN_TIMEOUT_S)]
    # Executors that share the cores of one machine must not each take all of them: their threads would wait for
    # one another at every operation.
    threads = ["--num-threads", str(max(1, num_usable_cores() // options.executors))]
    certificates = options.certificates
    door = ["--insecure"] if certificates is None else _flags(certificates.executor_settings())
    http = _http_flags(http_address)
    return [*options.program, "executor", *common, *threads, *door, *http, *model, *options.executor_args]


def router_command(
    options: StackOptions, name: str, address: str, executors: tuple[str, ...], http_address: str = ""
) -> list[str]:
    """The command line of one router. Redis is for its environment, because its URL holds a password."""
    model = [] if options.model is None else ["--model", options.model]
    common = ["--listen", address, "--router-id", name, "--drain-timeout-s", str(DRAIN_TIMEOUT_S)]
    links = ["--executors", ",".join(executors)]
    certificates = options.certificates
    door = [] if certificates is None else _flags(certificates.router_settings())
    http = _http_flags(http_address)
    return [*options.program, "router", *common, *links, *door, *http, *model, *options.router_args]


def gateway_command(options: StackOptions, address: str, routers: tuple[str, ...]) -> list[str]:
    """The command line of one gateway."""
    common = ["--listen", address, "--routers", ",".join(routers), "--drain-timeout-s", str(DRAIN_TIMEOUT_S)]
    certificates = options.certificates
    door = [] if certificates is None else _flags(certificates.gateway_settings())
    return [*options.program, "gateway", *common, *door, *options.gateway_args]


def _http_flags(address: str) -> list[str]:
    return ["--http-listen", address] if address else []


def _flags(settings: Mapping[str, str]) -> list[str]:
    return [word for setting in settings.items() for word in setting]
