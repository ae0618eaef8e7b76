"""Settings of a gateway process. Read once, validated, never changed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from common.settings import ProcessSettings


class GatewaySettings(ProcessSettings):
    """Settings of `inflight gateway`, the OpenAI-compatible HTTP API in front of routers."""

    listen: str = Field("127.0.0.1:8000", description="address to serve HTTP on, host:port; port 0 takes a free one")
    routers: tuple[str, ...] = Field(
        ("127.0.0.1:50051",),
        min_length=1,
        description="router addresses host:port, comma-separated; dns:///name:port alone means every address of a name",
    )
    router_tls_ca_file: Path | None = Field(
        None, description="PEM certificates of the CAs that sign routers' certificates; unset: no TLS to routers"
    )
    router_tls_cert_file: Path | None = Field(None, description="PEM certificate chain shown to routers")
    router_tls_key_file: Path | None = Field(None, description="PEM private key of router_tls_cert_file")
    router_tls_name: str = Field(
        "", description="name that routers' certificates must have; empty: the host of their address"
    )
    tls_cert_file: Path | None = Field(None, description="PEM certificate chain for clients; unset: HTTP in the clear")
    tls_key_file: Path | None = Field(None, description="PEM private key of tls_cert_file")
    max_body_bytes: int = Field(4 * 1024 * 1024, ge=1024, le=64 * 1024 * 1024, description="largest body of a request")
    max_requests: int = Field(2000, ge=1, description="running requests; more are refused with 503")
    max_choices: int = Field(128, ge=1, le=10_000, description="choices of one request: prompts times n")
    default_priority: Literal["interactive", "standard", "batch"] | None = Field(
        None, description="class of requests without one; unset: the router's default for the caller"
    )
    default_resume_ttl_s: float = Field(
        0.0,
        ge=0,
        le=3600,
        description="seconds that a stream without resume_ttl_s goes on after its client has left; 0: it is cancelled "
        "at once",
    )
    heartbeat_s: float = Field(
        10.0, gt=0, le=3600, description="seconds of silence after which a stream gets a comment, so that it stays open"
    )
    body_timeout_s: float = Field(30.0, gt=0, le=3600, description="seconds that a request's body may take to arrive")
    write_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="seconds that a client may leave its stream unread; then it is cut off"
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="origins whose pages may call from a browser, comma-separated, * for any; empty: none"
    )
    drain_timeout_s: float = Field(30.0, ge=0, description="seconds that running requests get to end on SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level logged")
    log_format: Literal["text", "json"] = Field("text", description="json: every line of the log is one JSON object")

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file: give both or neither")
        if (self.router_tls_cert_file is None) != (self.router_tls_key_file is None):
            raise ValueError("router_tls_cert_file and router_tls_key_file: give both or neither")
        if self.router_tls_ca_file is None and (self.router_tls_cert_file or self.router_tls_name):
            raise ValueError("router_tls_ca_file: needed with router_tls_cert_file and router_tls_name")
        return self
