"""Settings of a gateway process. Read once, validated, never changed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from inflight.common.settings import ProcessSettings

# As of the router's `resume_secret`: it can be tried against guesses by anyone who reads Redis.
MIN_SECRET_CHARACTERS = 32
STORE_SCHEMES = ("redis://", "rediss://", "unix://")
# Name and prefix.
FILES_BUCKET = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([\w!.*'()/-]*))?", re.ASCII)


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
        description="URL of the Redis server that keeps responses, and with files the records of files and batches: "
        "redis://, rediss:// or unix://; may contain a password; unset or empty: no response is stored, and store, "
        "background and previous_response_id are refused",
    )
    store_secret: SecretStr | None = Field(
        None,
        description="secret that all gateways of a store share, at least 32 characters, by which they encrypt the "
        "keys of clients whose responses run in the background, or whose batches run; unset: these keys stand in Redis "
        "as they are, until their responses or batches have ended",
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
    files: str | None = Field(
        None,
        description="where files and the results of batches are kept: a folder that all gateways share, or "
        "s3://BUCKET/PREFIX with the AWS_* variables of AWS's tools; needs store_url; unset or empty: there are no "
        "files and batches",
    )
    files_ttl_s: float = Field(
        2_592_000.0,
        ge=3600,
        le=31_536_000,
        description="seconds that a file is kept after its upload, and a batch and its results after its end",
    )
    files_max_file_bytes: int = Field(200 * 1024 * 1024, ge=1024, le=2**40, description="maximum bytes of a file")
    files_max_files: int = Field(1000, ge=1, le=100_000, description="maximum files of a tenant")
    files_max_bytes: int = Field(
        10 * 1024 * 1024 * 1024, ge=1024, le=2**50, description="maximum bytes of all files of a tenant"
    )
    batch_max_lines: int = Field(50_000, ge=1, le=1_000_000, description="maximum requests of a batch")
    batch_max_open: int = Field(
        50, ge=1, le=10_000, description="maximum batches of a tenant that have not ended; more are refused with 429"
    )
    batch_max_running: int = Field(
        256, ge=1, le=100_000, description="maximum requests of batches at routers at a time"
    )
    batch_max_running_each: int = Field(
        64, ge=1, le=100_000, description="maximum requests of one batch at routers at a time"
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

    @field_validator("files")
    @classmethod
    def _check_files(cls, place: str | None) -> str | None:
        if place and "://" in place and not FILES_BUCKET.fullmatch(place):
            raise ValueError("must be a folder, or s3://BUCKET or s3://BUCKET/PREFIX")
        return place or None

    @field_validator("store_secret")
    @classmethod
    def _check_store_secret(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and len(secret.get_secret_value()) < MIN_SECRET_CHARACTERS:
            raise ValueError(f"needs at least {MIN_SECRET_CHARACTERS} characters")
        return secret

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.files and self.store_url is None:
            raise ValueError("files: needs store_url")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file: give both or neither")
        if (self.router_tls_cert_file is None) != (self.router_tls_key_file is None):
            raise ValueError("router_tls_cert_file and router_tls_key_file: give both or neither")
        if self.router_tls_ca_file is None and (self.router_tls_cert_file or self.router_tls_name):
            raise ValueError("router_tls_ca_file: needed with router_tls_cert_file and router_tls_name")
        return self
