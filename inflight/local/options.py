"""Options of a local stack, and the command lines of its processes. Plain data; starts nothing."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from inflight.common.machine import num_usable_cores
from inflight.local.certificates import CertificateFolder
from inflight.local.state import DEFAULT_RUN_DIR

# Servers end their streams within this time on SIGTERM, before the stack stops asking.
DRAIN_TIMEOUT_S = 5.0
STOP_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class StackOptions:
    """A local stack: a private Redis, `executors`, `routers` and `gateways` processes.

    `port` is the first router's, `http_port` that of its metrics and dashboard, `gateway_port` the first gateway's. All
    other ports, and these if they are `None`, are free ones. `redis_url` is a Redis that already runs. The extra
    arguments are flags of `inflight executor`, `inflight router` and `inflight gateway`. `start_timeout_s` includes
    loading the model and, the first time, compiling the kernels. `program` is the command that runs a role,
    `executor_program` that of executors if they need another Python. `executor_model` is a folder and the name under
    which executors serve it, for an engine that does not read `model` itself. `tls` uses TLS to routers and mutual TLS
    to executors, with certificates created in the run directory at every start.
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
    program: tuple[str, ...] = (sys.executable, "-P", "-m", "inflight.cli.main")
    executor_program: tuple[str, ...] | None = None
    executor_model: tuple[str, str] | None = None

    @property
    def certificates(self) -> CertificateFolder | None:
        """The stack's certificates; None without `tls`."""
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
        for one, other in itertools.combinations(("port", "http_port", "gateway_port"), 2):
            if getattr(self, one) is not None and getattr(self, one) == getattr(self, other):
                raise ValueError(f"{one} and {other} are both {getattr(self, one)}; each needs a port of its own")

    @property
    def names_with_chosen_ports(self) -> frozenset[str]:
        """The processes whose ports the user chose."""
        router = {"router-0"} if self.port is not None or self.http_port is not None else set()
        gateway = {"gateway-0"} if self.gateway_port is not None else set()
        return frozenset(router | gateway)


def executor_command(
    options: StackOptions, name: str, address: str, http_address: str = "", device_index: int | None = None
) -> list[str]:
    """Returns the command line of one executor."""
    model = [] if options.model is None else ["--model", options.model]
    if options.executor_model is not None:
        folder, name_of_model = options.executor_model
        model = ["--model", folder, "--served-model-name", name_of_model]
    common = ["--listen", address, "--executor-id", name, "--drain-timeout-s", str(DRAIN_TIMEOUT_S)]
    # Executors that share a machine also share its cores: otherwise their threads would wait for one another at every
    # operation.
    threads = ["--num-threads", str(max(1, num_usable_cores() // options.executors))]
    certificates = options.certificates
    tls = ["--insecure"] if certificates is None else _flags(certificates.executor_settings())
    http = _http_flags(http_address)
    device = [] if device_index is None else ["--device-index", str(device_index)]
    program = options.executor_program or options.program
    return [*program, "executor", *common, *threads, *tls, *http, *model, *device, *options.executor_args]


def router_command(
    options: StackOptions, name: str, address: str, executors: tuple[str, ...], http_address: str = ""
) -> list[str]:
    """Returns the command line of one router. The URL of Redis is in its environment, because it holds a password."""
    model = [] if options.model is None else ["--model", options.model]
    common = ["--listen", address, "--router-id", name, "--drain-timeout-s", str(DRAIN_TIMEOUT_S)]
    links = ["--executors", ",".join(executors)]
    certificates = options.certificates
    tls = [] if certificates is None else _flags(certificates.router_settings())
    http = _http_flags(http_address)
    return [*options.program, "router", *common, *links, *tls, *http, *model, *options.router_args]


def gateway_command(options: StackOptions, address: str, routers: tuple[str, ...]) -> list[str]:
    """Returns the command line of one gateway."""
    common = ["--listen", address, "--routers", ",".join(routers), "--drain-timeout-s", str(DRAIN_TIMEOUT_S)]
    certificates = options.certificates
    tls = [] if certificates is None else _flags(certificates.gateway_settings())
    return [*options.program, "gateway", *common, *tls, *options.gateway_args]


def _http_flags(address: str) -> list[str]:
    return ["--http-listen", address] if address else []


def _flags(settings: Mapping[str, str]) -> list[str]:
    return [word for setting in settings.items() for word in setting]
