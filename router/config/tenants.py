"""What the admission file says: what each tenant may take, and which names stand for several models.

Pure: TOML text in, plain frozen values out, or a `ContentError` that names the line of everything that is wrong and
what is allowed there.

    unknown_tenants = "refuse"            # or "default"

    [tenants.default]                     # who names no tenant, and every tenant without a table of its own
    max_running = 8

    [tenants.acme]
    weight = 2.0

    [variants.smollm]
    "smollm-inflight" = 90
    "smollm-static" = 10
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from router.config.file_problems import ContentError, Problem
from router.config.toml_lines import Path, error_line, key_lines, line_of
from router.config.variants import Variant
from router.store.types import DEFAULT_TENANT, NO_LIMITS, TenantLimits

MAX_TENANT_CHARACTERS = 256
TENANT_NAME = f"a tenant's name must have 1 to {MAX_TENANT_CHARACTERS} printable characters"
MAX_COUNT = 10**12
UNKNOWN_TENANTS = ("default", "refuse")


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """The file's meaning. `variants` maps a name to the models that it stands for."""

    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    refuses_unknown_tenants: bool = False
    variants: Mapping[str, tuple[Variant, ...]] = field(default_factory=dict)

    def limits_of(self, tenant: str) -> TenantLimits | None:
        """What the tenant may take; None where it is not served at all."""
        if tenant in self.tenants:
            return self.tenants[tenant]
        return None if self.refuses_unknown_tenants else self.tenants.get(DEFAULT_TENANT, NO_LIMITS)


NO_RULES = AdmissionRules()


@dataclass(frozen=True, slots=True)
class _Range:
    """The numbers that a key may have."""

    kind: type[int] | type[float]
    minimum: float
    maximum: float
    hint: str = ""

    def allows(self, value: Any) -> bool:
        is_number = isinstance(value, (int, self.kind)) and not isinstance(value, bool)
        return is_number and self.minimum <= value <= self.maximum  # which neither nan nor inf is

    def __str__(self) -> str:
        noun = "a whole number" if self.kind is int else "a number"
        return f"{noun} from {self.minimum:g} to {self.maximum:g}{self.hint}"


_WEIGHT = _Range(float, 1e-6, 1e6, "; a weight of 0 would never be served, use max_running = 0 to shut a tenant out")
_SHARE = _Range(float, 1e-6, 1e6, "; leave a model out that is to serve nobody")
_COUNT = _Range(int, 0, MAX_COUNT)
_BURST = _Range(int, 1, MAX_COUNT)
_RATE = _Range(float, 1e-6, 1e9)

LIMITS: dict[str, _Range] = {
    "weight": _WEIGHT,
    "max_running": _COUNT,
    "max_queue_requests": _COUNT,
    "max_queue_tokens": _COUNT,
    "max_queue_bytes": _COUNT,
    "requests_per_s": _RATE,
    "request_burst": _BURST,
    "tokens_per_s": _RATE,
    "token_burst": _BURST,
}
BURST_OF = {"requests_per_s": "request_burst", "tokens_per_s": "token_burst"}


def parse_rules(source: str, served: frozenset[str]) -> AdmissionRules:
    """What the file says. `served` are the models that this router serves. Raises `ContentError`."""
    try:
        content = tomllib.loads(source)
    except (ValueError, RecursionError) as error:  # also numbers too long and nesting too deep for Python
        raise ContentError((Problem(error_line(error, source), f"is not TOML: {error}"),)) from None
    reader = _Reader(key_lines(source))
    rules = reader.rules(content, served)
    if reader.problems:
        raise ContentError(tuple(sorted(reader.problems, key=lambda problem: problem.line or 0)))
    return rules


def is_tenant_name(name: str) -> bool:
    """Whether a tenant may be called so."""
    return name.isprintable() and 1 <= len(name) <= MAX_TENANT_CHARACTERS


class _Reader:
    """Reads tables into values and collects what is wrong with them."""

    def __init__(self, lines: dict[Path, int]) -> None:
        self.problems: list[Problem] = []
        self._lines = lines

    def rules(self, content: dict[str, Any], served: frozenset[str]) -> AdmissionRules:
        self._refuse_unknown((), content, ("unknown_tenants", "tenants", "variants"))
        unknown = content.get("unknown_tenants", "default")
        if unknown not in UNKNOWN_TENANTS:
            self._wrong(("unknown_tenants",), f'is {unknown!r:.80}; must be one of "default", "refuse"')
        tenants = {name: self._tenant(name, table) for name, table in self._tables("tenants", content)}
        variants = {name: self._variants(name, table, served) for name, table in self._tables("variants", content)}
        return AdmissionRules(tenants, unknown == "refuse", variants)

    def _tables(self, name: str, content: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """The tables below a name."""
        section = content.get(name, {})
        if not isinstance(section, dict):
            self._wrong((name,), f"must be tables [{name}.NAME]")
            return []
        tables: list[tuple[str, dict[str, Any]]] = []
        for key, table in section.items():
            if isinstance(table, dict):
                tables.append((key, table))
            else:
                self._wrong((name, key), f"must be a table [{name}.{key}]")
        return tables

    def _tenant(self, name: str, table: dict[str, Any]) -> TenantLimits:
        path = ("tenants", name)
        if not is_tenant_name(name):
            self._wrong(path, TENANT_NAME)
        self._refuse_unknown(path, table, tuple(LIMITS))
        given = {key: value for key, value in table.items() if key in LIMITS and self._number((*path, key), value)}
        for rate, burst in BURST_OF.items():
            if burst in given and rate not in table:
                self._wrong((*path, burst), f"means nothing without {rate}")
            elif rate in given and burst not in table:
                given[burst] = math.ceil(given[rate])
        return dataclasses.replace(NO_LIMITS, **given)

    def _number(self, path: Path, value: Any) -> bool:
        allowed = LIMITS[path[-1]]
        if not allowed.allows(value):
            self._wrong(path, f"is {value!r:.80}; must be {allowed}")
            return False
        return True

    def _variants(self, name: str, table: dict[str, Any], served: frozenset[str]) -> tuple[Variant, ...]:
        path = ("variants", name)
        if name in served:
            self._wrong(path, "is the name of a model that this router serves; choose another one for its variants")
        if not table:
            self._wrong(path, "names no model; at least one is needed")
        variants: list[Variant] = []
        for model, weight in table.items():
            if isinstance(weight, dict):
                self._wrong((*path, model), f'must be a weight; put quotes around a name with dots: "{model}.…"')
            elif model not in served:
                known = ", ".join(sorted(served))
                self._wrong((*path, model), f"this router does not serve this model; it serves {known}")
            elif not _SHARE.allows(weight):
                self._wrong((*path, model), f"is {weight!r:.80}; must be {_SHARE}")
            else:
                variants.append(Variant(model, float(weight)))
        return tuple(sorted(variants, key=lambda variant: variant.model))

    def _refuse_unknown(self, path: Path, table: dict[str, Any], known: tuple[str, ...]) -> None:
        for key in table:
            if key not in known:
                self._wrong((*path, key), f"is not known; known: {', '.join(known)}")

    def _wrong(self, path: Path, text: str) -> None:
        self.problems.append(Problem(line_of(self._lines, path), f"{'.'.join(path)}: {text}"))
