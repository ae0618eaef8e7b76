"""Settings of a gateway process. Read once, validated, never changed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from inflight.common.settings import ProcessSettings

# As of the router's `resume_secret`: it can be tried against guesses by anyone who reads Redis.
MIN_SECRET_CHARACTERS = 32
STORE_SCHEMES = ("redis://", "rediss://", "unix://")


class GatewaySettings(ProcessSettings):
    """Settings of the gateway, the OpenAI-compatible HTTP API in front of routers."""

    listen: str = Field(
        "127.0.0.1:8000",
        description="address for HTTP, host:port; host [::] is every interface, with IPv6 if there is any; port 0 "
        "picks a free port",
    )
    routers: tuple[str, ...] = Field(
        ("127.0.0.1:50051",),
        min_length=1,
        description="router addresses host:port, comma-separated; a single dns:///name:port stands for every "
        "address of the name",
    )
    router_tls_ca_file: Path | None = Field(
        None, description="PEM certificates of the authorities that sign router certificates; unset: no TLS to routers"
    )
    router_tls_cert_file: Path | None = Field(None, description="PEM certificate chain presented to routers")
    router_tls_key_file: Path | None = Field(None, description="PEM private key of router_tls_cert_file")
    router_tls_name: str = Field(
        "", description="name that router certificates must contain; empty: the host of the router's address"
    )
    share_calls: bool = Field(
        True,
        description="send streams with the same credentials in shared calls of GenerateMany, where the router has it, "
        "which costs less processor time; off: a call for each stream",
    )
    tls_cert_file: Path | None = Field(None, description="PEM certificate chain for clients; unset: no TLS")
    tls_key_file: Path | None = Field(None, description="PEM private key of tls_cert_file")
    max_body_bytes: int = Field(
        4 * 1024 * 1024, ge=1024, le=64 * 1024 * 1024, description="maximum size of a request body in bytes"
    )
    max_requests: int = Field(2000, ge=1, description="maximum concurrent requests; more are refused with status 503")
    max_choices: int = Field(128, ge=1, le=10_000, description="maximum choices of one request: prompts times n")
    default_priority: Literal["interactive", "standard", "batch"] | None = Field(
        None, description="class of requests that do not name one; unset: the router's default"
    )
    default_resume_ttl_s: float = Field(
        0.0,
        ge=0,
        le=3600,
        description="seconds that a stream without resume_ttl_s continues after its client disconnects; 0: it is "
        "cancelled at once",
    )
    reasoning_fields: tuple[Literal["reasoning_content", "reasoning"], ...] = Field(
        ("reasoning_content",),
        description="fields of messages and deltas that have the model's reasoning, comma-separated: "
        "reasoning_content, as in DeepSeek's API, reasoning, as in newer versions of vLLM, or both",
    )
    heartbeat_s: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="seconds of silence after which a stream gets an SSE comment, so that proxies keep it open",
    )
    idle_timeout_s: float = Field(
        120.0,
        gt=0,
        le=86_400,
        description="seconds that a connection may be idle between two requests; longer than a load balancer keeps its "
        "connections, so that it sends no request to one that is being closed",
    )
    body_timeout_s: float = Field(30.0, gt=0, le=3600, description="maximum seconds for a request body to arrive")
    write_timeout_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="seconds that a client may leave its stream unread; then the connection is closed",
    )
    store_url: SecretStr | None = Field(
        None,
        description="URL of the Redis server that keeps responses: redis://, rediss:// or unix://; may contain a "
        "password; unset or empty: no response is stored, and store, background and previous_response_id are refused",
    )
    store_secret: SecretStr | None = Field(
        None,
        description="secret that all gateways of a store share, at least 32 characters, by which they encrypt the "
        "keys of clients whose responses run in the background; unset: these keys stand in Redis as they are, until "
        "their responses have ended",
    )
    store_by_default: bool = Field(
        True, description="store responses whose request does not say so, as OpenAI's API does; only with store_url"
    )
    store_ttl_s: float = Field(
        86_400.0,
        ge=1,
        le=31_536_000,
        description="seconds that a stored response is kept after it was written, or continued by another one",
    )
    store_max_responses: int = Field(
        1000, ge=1, description="maximum stored responses of a tenant; the longest unused ones are deleted for new ones"
    )
    store_max_bytes: int = Field(
        64 * 1024 * 1024, ge=1024, description="maximum bytes of a tenant's stored responses, likewise"
    )
    store_max_running: int = Field(
        100, ge=1, description="maximum background responses of a tenant at a time; more are refused with status 429"
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="origins whose pages may call from a browser, comma-separated; * for any; empty: none"
    )
    drain_timeout_s: float = Field(30.0, ge=0, description="seconds that running requests have to finish after SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="minimum severity of log messages"
    )
    log_format: Literal["text", "json"] = Field("text", description="json: one JSON object per line")

    @field_validator("store_url")
    @classmethod
    def _check_store_url(cls, url: SecretStr | None) -> SecretStr | None:
        if url is None or not url.get_secret_value():
            return None
        # The text repeats no part of the URL, which may contain a password.
        if not url.get_secret_value().startswith(STORE_SCHEMES):
            raise ValueError(f"must begin with {' or '.join(STORE_SCHEMES)}")
        return url

    @field_validator("store_secret")
    @classmethod
    def _check_store_secret(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and len(secret.get_secret_value()) < MIN_SECRET_CHARACTERS:
            raise ValueError(f"needs at least {MIN_SECRET_CHARACTERS} characters")
        return secret

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file: give both or neither")
        if (self.router_tls_cert_file is None) != (self.router_tls_key_file is None):
            raise ValueError("router_tls_cert_file and router_tls_key_file: give both or neither")
        if self.router_tls_ca_file is None and (self.router_tls_cert_file or self.router_tls_name):
            raise ValueError("router_tls_ca_file: needed with router_tls_cert_file and router_tls_name")
        return self
