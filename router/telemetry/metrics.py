"""Prometheus metrics of a router's requests and calls of the ledger; docs/metrics.md defines each name.

The registry belongs to the process. All input comes from `inflight.router.telemetry.events` and the ledger. In the path
of a token there is one count and one observation for each delivery.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from inflight.common.errors import Reason
from inflight.router.ledger.types import FIGURES, Account, AccountUsage, LedgerCall
from inflight.router.telemetry.events import CLASS_NAMES, PlacedAt, RequestEnd, RequestFacts, RequestRecorder

# The value of gen_ai.provider.name.
PROVIDER = "inflight"

GEN_AI_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")

# As recommended by OpenTelemetry's semantic conventions for generative AI, seconds.
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
# GPUs produce tokens faster than the smallest recommended bucket.
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, *PER_TOKEN_BUCKETS)
# From immediate admission to what a batch job accepts.
WAIT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# A call takes some 100 µs and is given up after 2 s.
REDIS_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


# Of each figure of an account: the counter, what it counts, and how many of the figure's unit are one of the counter's.
USAGE_COUNTERS = {
    "busy_ns": ("usage_busy_seconds", "Busy time of executors, shared by the tokens of each step.", 1e9),
    "seat_us": ("usage_seat_seconds", "Time with a seat.", 1e6),
    "block_ms": ("usage_block_seconds", "Time with KV blocks, per block.", 1e3),
    "computed_prompt_tokens": ("usage_computed_prompt_tokens", "Prompt tokens that were computed.", 1),
    "cached_prompt_tokens": ("usage_cached_prompt_tokens", "Prompt tokens from the prefix cache.", 1),
    "output_tokens": ("usage_output_tokens", "Output tokens.", 1),
    "wasted_draft_tokens": ("usage_wasted_draft_tokens", "Drafted tokens that were not accepted.", 1),
    "recomputed_tokens": ("usage_recomputed_tokens", "Tokens that were computed again.", 1),
}
# The class of what no tenant is charged for.
SYSTEM_CLASS = "system"
# Of tenants that are not named in the settings, and of what no tenant is charged for.
OTHER_TENANTS, SYSTEM_TENANT = "(others)", "(system)"


@dataclass(frozen=True, slots=True)
class TenantCosts:
    """The tenants whose usage has metrics of its own, and what it costs. `cost_of` returns the cost of so many
    nanoseconds of an account, None without a price."""

    tenants: frozenset[str]
    currency: str
    cost_of: Callable[[Account, int], float | None]


class RouterMetrics:
    """The metrics of one router: a `inflight.router.telemetry.events.RequestObserver`. The calls of the ledger
    `ledger_called`."""

    def __init__(
        self, registry: CollectorRegistry, models: Collection[str], tenant_costs: TenantCosts | None = None
    ) -> None:
        self._registry = registry
        per_class = ("model", "class")
        self.first_token = self._histogram(
            "gen_ai_server_time_to_first_token_seconds", "Time to first token.", FIRST_TOKEN_BUCKETS
        )
        self.per_token = self._histogram(
            "gen_ai_server_time_per_output_token_seconds", "Mean time per output token.", PER_TOKEN_BUCKETS
        )
        self.duration = self._histogram(
            "gen_ai_server_request_duration_seconds",
            "Time from arrival to the end of a request.",
            DURATION_BUCKETS,
            (*GEN_AI_LABELS, "error_type"),
        )
        self.inter_token = self._histogram(
            "inflight_inter_token_seconds", "Time between deliveries, per token.", INTER_TOKEN_BUCKETS, ("model",)
        )
        self.queue_wait = self._histogram(
            "inflight_queue_wait_seconds", "From arrival to the first placement.", WAIT_BUCKETS, per_class
        )
        self.redis_seconds = self._histogram(
            "inflight_redis_call_seconds", "Duration of ledger calls to Redis.", REDIS_BUCKETS, ("script",)
        )
        self.requests = self._counter(
            "inflight_requests", "Ended requests, by finish reason or error reason.", (*per_class, "outcome")
        )
        self.refusals = self._counter(
            "inflight_refusals", "Requests refused before they entered the queue.", (*per_class, "reason")
        )
        self.admissions = self._counter("inflight_admissions", "Requests placed for the first time.", per_class)
        self.prompt_tokens = self._counter(
            "inflight_prompt_tokens", "Prompt tokens of requests with a seat.", ("model",)
        )
        self.cached_tokens = self._counter(
            "inflight_cached_prompt_tokens", "Prompt tokens from the prefix cache.", ("model",)
        )
        self.output_tokens = self._counter("inflight_output_tokens", "Output tokens sent to clients.", ("model",))
        self.migrations = self._counter(
            "inflight_migrations", "Requests that lost their placement.", ("model", "reason")
        )
        self.extensions = self._counter(
            "inflight_reservation_extensions",
            "Reservations used up by requests without max_tokens, which then reserved more.",
            ("model",),
        )
        self.resumed = self._counter("inflight_resumed", "Resumed streams.", ("model",))
        self.breaches = self._counter("inflight_executor_protocol_breaches", "Links ended by false messages.", ())
        self.incomplete = self._counter(
            "inflight_incomplete_streams", "Streams ended with INTERNAL because a token was missing.", ("model",)
        )
        self.redis_errors = self._counter("inflight_redis_errors", "Failed ledger calls to Redis.", ("script",))
        self.redis_up = Gauge("inflight_redis_up", "1 if the latest ledger call succeeded, else 0.", registry=registry)
        self._usage = self._usage_counters()
        self._tenant_usage = _TenantUsage(registry, tenant_costs)
        self._recorders: dict[tuple[str, str, str], _Measures] = {}
        self._begin_at_zero(models)

    def _begin_at_zero(self, models: Collection[str]) -> None:
        """Exports the counters of each model from the beginning on."""
        per_model = (self.prompt_tokens, self.cached_tokens, self.output_tokens)
        for counter in (*per_model, self.extensions, self.resumed, self.incomplete):
            for model in models:
                counter.labels(model)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = GEN_AI_LABELS
    ) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)

    def _usage_counters(self) -> list[Counter]:
        labels = ("model", "class", "executor_class")
        counters = (USAGE_COUNTERS[figure] for figure in FIGURES)
        return [self._counter(f"inflight_{name}", text, labels) for name, text, _ in counters]

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def follow(self, facts: RequestFacts) -> RequestMeter:
        key = (facts.model, facts.priority_class, facts.operation)
        measures = self._recorders.get(key)
        if measures is None:
            measures = self._recorders[key] = _Measures(self, *key)
        return RequestMeter(measures, facts.prompt_tokens, facts.prior_tokens)

    def refused(self, model: str, priority_class: str, reason: Reason) -> None:
        self.refusals.labels(model, priority_class, reason.value).inc()

    def charged(self, model: str, added: AccountUsage) -> None:
        """Counts what this router has added to the ledger's totals."""
        account = added.account
        name = SYSTEM_CLASS if account.is_system else CLASS_NAMES[account.priority_class]
        labels = (model, name, account.executor_class)
        for counter, figure, value in zip(self._usage, FIGURES, added.figures, strict=True):
            counter.labels(*labels).inc(value / USAGE_COUNTERS[figure][2])
        self._tenant_usage.charged(model, account, added.figures[FIGURES.index("busy_ns")])

    def ledger_called(self, call: LedgerCall) -> None:
        """Records a finished call of the ledger."""
        self.redis_seconds.labels(call.script).observe(call.seconds)
        if not call.succeeded:
            self.redis_errors.labels(call.script).inc()
        self.redis_up.set(call.succeeded)


class _TenantUsage:
    """The busy time and costs of tenants that the settings name."""

    def __init__(self, registry: CollectorRegistry, costs: TenantCosts | None) -> None:
        self._costs = costs
        labels = ("model", "tenant")
        self._busy = Counter(
            "inflight_usage_tenant_busy_seconds", "Busy time of executors, by tenant.", labels, registry=registry
        )
        self._cost = Counter(
            "inflight_usage_tenant_cost", "Cost of busy time, by tenant.", (*labels, "currency"), registry=registry
        )

    def charged(self, model: str, account: Account, busy_ns: int) -> None:
        if self._costs is None:
            return
        tenant = account.tenant if account.tenant in self._costs.tenants else OTHER_TENANTS
        tenant = SYSTEM_TENANT if account.is_system else tenant
        self._busy.labels(model, tenant).inc(busy_ns / 1e9)
        cost = self._costs.cost_of(account, busy_ns)
        if cost is not None:
            self._cost.labels(model, tenant, self._costs.currency).inc(cost)


class _Measures:
    """The metrics of one model, class and operation: labels are looked up once, not for each token."""

    def __init__(self, metrics: RouterMetrics, model: str, priority_class: str, operation: str) -> None:
        gen_ai = (operation, PROVIDER, model)
        self.first_token = metrics.first_token.labels(*gen_ai)
        self.per_token = metrics.per_token.labels(*gen_ai)
        self.inter_token = metrics.inter_token.labels(model)
        self.queue_wait = metrics.queue_wait.labels(model, priority_class)
        self.admissions = metrics.admissions.labels(model, priority_class)
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.cached_tokens = metrics.cached_tokens.labels(model)
        self.output_tokens = metrics.output_tokens.labels(model)
        self.extensions = metrics.extensions.labels(model)
        self.resumed = metrics.resumed.labels(model)
        self.incomplete = metrics.incomplete.labels(model)
        self._metrics = metrics
        self._gen_ai = gen_ai
        self._class = (model, priority_class)

    def moved(self, why: str) -> None:
        self._metrics.migrations.labels(self._class[0], why).inc()

    def ended(self, end: RequestEnd) -> None:
        self._metrics.requests.labels(*self._class, end.outcome).inc()
        error_type = end.outcome if end.is_error else ""
        self._metrics.duration.labels(*self._gen_ai, error_type).observe(end.duration_s)


class RequestMeter(RequestRecorder):
    """Counts one request when it is placed, and its end at the router that has it then."""

    def __init__(self, measures: _Measures, prompt_tokens: int, prior_tokens: int) -> None:
        self._measures = measures
        self._prompt_tokens = prompt_tokens
        self._prior_tokens = prior_tokens

    def placed(self, placed: PlacedAt) -> None:
        if placed.wait_s is not None:
            self._measures.admissions.inc()
            self._measures.queue_wait.observe(placed.wait_s)

    def boarded(self, cached_tokens: int) -> None:
        self._measures.prompt_tokens.inc(self._prompt_tokens)
        self._measures.cached_tokens.inc(cached_tokens)

    def first_sent(self, after_s: float) -> None:
        self._measures.first_token.observe(after_s)

    def sent(self, num_tokens: int, interval_s: float | None) -> None:
        self._measures.output_tokens.inc(num_tokens)
        if interval_s is not None:
            self._measures.inter_token.observe(interval_s / num_tokens)

    def moved(self, why: str) -> None:
        self._measures.moved(why)

    def extended(self) -> None:
        self._measures.extensions.inc()

    def resumed(self) -> None:
        self._measures.resumed.inc()

    def incomplete(self) -> None:
        self._measures.incomplete.inc()

    def ended(self, end: RequestEnd) -> None:
        self._measures.ended(end)
        num_later = end.output_tokens - self._prior_tokens - 1
        if end.decode_s is not None and num_later > 0:
            self._measures.per_token.observe(end.decode_s / num_later)
