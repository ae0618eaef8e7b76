"""The tenant configuration: the limits of each tenant, and the names that stand for several models.

It comes from the file of the setting `admission_file`:

    unknown_tenants = "refuse"            # or "default"

    [tenants.default]                     # requests without a tenant, and every tenant without a table of its own
    max_running = 8

    [tenants.acme]
    weight = 2.0

    [variants.smollm]
    "smollm-inflight" = 90
    "smollm-static" = 10
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from inflight.router.config.toml_file import BELOW, Table, read_toml
from inflight.router.config.watched_file import FileWatcher
from inflight.router.ledger.types import DEFAULT_TENANT, NO_LIMITS, TenantLimits
from inflight.router.request.errors import shut_out, unknown_tenant


@dataclass(frozen=True, slots=True)
class Variant:
    """A model that a name may stand for. `weight` is relative to those of the others."""

    model: str
    weight: float


def choose_variant(variants: Sequence[Variant], key: str) -> Variant:
    """Returns the variant that serves the key, by weighted rendezvous hashing: every router makes the same choice, and
    an added model takes its share evenly from the others."""
    return min(variants, key=lambda variant: _draw(variant.model, key) / variant.weight)


def share_of(variant: Variant, variants: Sequence[Variant]) -> float:
    """Returns the part of all keys that a variant serves, 0 to 1."""
    return variant.weight / sum(one.weight for one in variants)


def _draw(model: str, key: str) -> float:
    """Returns an exponentially distributed number. The least of several, each divided by its weight, wins in proportion
    to the weights."""
    digest = hashlib.blake2b(f"{model}\0{key}".encode(), digest_size=8).digest()
    return -math.log((int.from_bytes(digest) + 1) / 2**64)


MAX_TENANT_CHARACTERS = 256
MAX_COUNT = 10**12
BURST_OF = {"requests_per_s": "request_burst", "tokens_per_s": "token_burst"}


def is_tenant_name(name: str) -> bool:
    """Returns whether a tenant can have this name."""
    return name.isprintable() and 1 <= len(name) <= MAX_TENANT_CHARACTERS


def _tenant_name(name: str) -> str:
    if not is_tenant_name(name):
        raise ValueError(f"a tenant's name must have 1 to {MAX_TENANT_CHARACTERS} printable characters")
    return name


def _within(minimum: float, maximum: float, hint: str = "") -> AfterValidator:
    """Returns a validator that a number is in [minimum, maximum]. NaN is not."""

    def check(value: float) -> float:
        if not minimum <= value <= maximum:
            raise ValueError(f"must be a number from {minimum:g} to {maximum:g}{hint}")
        return value

    return AfterValidator(check)


def _variant_name(name: str, validation: ValidationInfo[frozenset[str]]) -> str:
    if name in validation.context:
        raise ValueError("is the name of a model that this router serves; choose another one for its variants")
    return name


def _served_model(name: str, validation: ValidationInfo[frozenset[str]]) -> str:
    if name not in validation.context:
        raise ValueError(f"this router does not serve this model; it serves {', '.join(sorted(validation.context))}")
    return name


def _no_table(value: Any) -> Any:
    if isinstance(value, dict):
        raise ValueError("must be a weight; put quotes around a model's name with dots")
    return value


def _some_model(shares: dict[str, float]) -> dict[str, float]:
    if not shares:
        raise ValueError("names no model; at least one is needed")
    return shares


TenantName = Annotated[str, AfterValidator(_tenant_name)]
Rate = Annotated[float, _within(1e-6, 1e9)]
Count = Annotated[int, _within(0, MAX_COUNT)]
Burst = Annotated[int, _within(1, MAX_COUNT)]
Weight = Annotated[
    float, _within(1e-6, 1e6, "; a weight of 0 would never be served, use max_running = 0 to shut a tenant out")
]
Share = Annotated[float, _within(1e-6, 1e6, "; to send no requests to a model, omit it"), BeforeValidator(_no_table)]
Shares = Annotated[dict[Annotated[str, AfterValidator(_served_model)], Share], AfterValidator(_some_model)]


class TenantTable(Table):
    """`[tenants.NAME]`: the keys are those of `TenantLimits`, and mean the same; and the adapters that the tenant may
    use."""

    weight: Weight = NO_LIMITS.weight
    max_running: Count | None = None
    max_queue_requests: Count | None = None
    max_queue_tokens: Count | None = None
    max_queue_bytes: Count | None = None
    requests_per_s: Rate | None = None
    request_burst: Burst = NO_LIMITS.request_burst
    tokens_per_s: Rate | None = None
    token_burst: Burst = NO_LIMITS.token_burst
    adapters: list[Annotated[str, Field(min_length=1)]] | None = None

    @model_validator(mode="after")
    def _check_bursts(self) -> Self:
        for rate, burst in BURST_OF.items():
            if burst in self.model_fields_set and rate not in self.model_fields_set:
                raise PydanticCustomError("unused", f"has no effect without {rate}", {BELOW: (burst,)})
        return self

    def limits(self) -> TenantLimits:
        """The limits. A burst that is not given is one second of the rate."""
        given = self.model_dump(exclude_unset=True, exclude={"adapters"})
        for rate, burst in BURST_OF.items():
            if rate in given:
                given.setdefault(burst, math.ceil(given[rate]))
        return dataclasses.replace(NO_LIMITS, **given)


class _File(Table):
    """The whole file. The context of its validation is the set of models that this router serves."""

    unknown_tenants: Literal["default", "refuse"] = "default"
    tenants: dict[TenantName, TenantTable] = Field(default_factory=dict)
    variants: dict[Annotated[str, AfterValidator(_variant_name)], Shares] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """The content of the file. `variants` maps a name to the models that it stands for, `adapters` a tenant to those
    that it may use; one without an entry may use all."""

    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    refuses_unknown_tenants: bool = False
    variants: Mapping[str, tuple[Variant, ...]] = field(default_factory=dict)
    adapters: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def adapters_of(self, tenant: str) -> frozenset[str] | None:
        """Returns the names of the LoRA adapters that the tenant may use; None if it may use all."""
        return self.adapters.get(tenant if tenant in self.tenants else DEFAULT_TENANT)

    def limits_of(self, tenant: str) -> TenantLimits | None:
        """Returns the tenant's limits; None if it is not served."""
        if tenant in self.tenants:
            return self.tenants[tenant]
        return None if self.refuses_unknown_tenants else self.tenants.get(DEFAULT_TENANT, NO_LIMITS)

    def limits_of_served(self, tenant: str) -> TenantLimits:
        """Returns the tenant's limits. Raises `RequestError` for a tenant that is not served."""
        limits = self.limits_of(tenant)
        if limits is None:
            raise unknown_tenant(tenant)
        if limits.max_running == 0:
            raise shut_out(tenant)
        return limits


NO_CONFIG = TenantConfig()


def parse_tenants(source: str, served: frozenset[str]) -> TenantConfig:
    """Parses the file. `served` are the models that this router serves. Raises `ContentError`."""
    file = read_toml(source, _File, served)
    tenants = {name: table.limits() for name, table in file.tenants.items()}
    variants = {
        name: tuple(Variant(model, share) for model, share in sorted(shares.items()))
        for name, shares in file.variants.items()
    }
    adapters = {name: frozenset(table.adapters) for name, table in file.tenants.items() if table.adapters is not None}
    return TenantConfig(tenants, file.unknown_tenants == "refuse", variants, adapters)


class TenantConfigFile:
    """The configuration in force. Without a file it never changes."""

    def __init__(self, file: FileWatcher[TenantConfig] | None, config: TenantConfig = NO_CONFIG) -> None:
        self._file = file
        self._config = config

    @classmethod
    def open(
        cls, path: Path | None, served: frozenset[str], on_read: Callable[[str | None], None] = lambda problem: None
    ) -> Self:
        """Reads the file; `on_read` is called for every change (see `FileWatcher`). Raises `SettingError` if the file
        cannot be used."""
        if path is None:
            return cls(None)
        parse = functools.partial(parse_tenants, served=served)
        return cls(FileWatcher(path, "admission_file", "admission file", parse, on_read))

    @property
    def config(self) -> TenantConfig:
        return self._config if self._file is None else self._file.content

    async def follow(self) -> None:
        """Reads the file again whenever it changes, until cancelled; without a file it returns."""
        if self._file is not None:
            await self._file.follow()

    def look(self) -> None:
        """Reads the file again if it has changed since the last look."""
        assert self._file is not None
        self._file.look()
