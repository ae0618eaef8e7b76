"""The models that this router serves, and their executors.

A `ModelPool` is one model: its tokenizer, its ledger and its live requests. `ModelPools` finds the pool of a request
by the model's name, or by a name that stands for several models, its variants. `VariantMeters` measures the variants,
so that they can be compared. `ModelPools` keeps a link to every executor address. It passes the events of a link to the
pool whose model the executor serves.

Executors report the name and the content hash of each LoRA adapter that they can serve. During a rollout, executors may
report different contents for one name. A request gets one of these contents when it is admitted, and keeps it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from inflight.common.errors import FieldViolation, Reason, RequestError, invalid
from inflight.router.auth.caller import Caller, model_of, sees_model
from inflight.router.config.tenants import Variant, choose_variant, share_of
from inflight.router.discovery import watch
from inflight.router.dispatch.dispatcher import Dispatcher
from inflight.router.executors.channel import ExecutorChannels
from inflight.router.executors.link import MAX_OUTPUT_DELAY_S, ExecutorLink, LinkEvents
from inflight.router.lifecycle.events import LinkEvent, SequenceEnded
from inflight.router.request.errors import no_executor
from inflight.router.stream.request_stream import RequestStream
from inflight.router.telemetry.event_log import EventLog
from inflight.router.telemetry.events import NO_OBSERVERS, RequestObservers
from inflight.router.text.tokenizer import TextModel
from inflight.v1 import executor_pb2, inference_pb2

log = logging.getLogger(__name__)

Variants = Mapping[str, tuple[Variant, ...]]

# Of a value in a log line.
MAX_LISTED = 16
MAX_LISTED_CHARACTERS = 200
# Of adapters, in an error.
MAX_LISTED_NAMES = 32

# How many of the newest values of each latency are kept for a model under a name.
NUM_KEPT_LATENCIES = 1000


@dataclass(frozen=True, slots=True)
class ModelPool:
    name: str
    text: TextModel
    dispatcher: Dispatcher
    observers: RequestObservers = NO_OBSERVERS

    @property
    def links(self) -> tuple[ExecutorLink, ...]:
        """The links to executors that can be used now, ordered by executor id."""
        return tuple(sorted(self.dispatcher.links, key=lambda link: link.executor_id))

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The adapters that new requests can use, by name."""
        return adapters_of(link.report for link in self.links if link.report and link.description.num_adapter_slots)

    def adapter(self, name: str, allowed: Collection[str] | None = None) -> Adapter:
        """Returns the adapter that a name currently means, if it is in `allowed`; None allows all. Raises
        `RequestError`, which does not reveal whether there are adapters that are not allowed."""
        adapters = {one: known for one, known in self.adapters.items() if allowed is None or one in allowed}
        if name not in adapters:
            raise unknown_adapter(self.name, name, adapters)
        return adapters[name]

    def describe(self) -> executor_pb2.DescribeResponse:
        """Returns the description that most of its executors share. Raises `RequestError` if no executor is
        reachable."""
        description = self.dispatcher.description
        if description is None:
            raise no_executor(f"no executor of model {self.name} is reachable")
        return description


class ModelPools:
    """All models of this router, and its links. Implements `inflight.router.executors.link.LinkRegistry`."""

    def __init__(
        self,
        pools: Sequence[ModelPool],
        router_id: str,
        current_variants: Callable[[], Variants] = dict,
        channels: ExecutorChannels | None = None,
        events: EventLog | None = None,
        count_breach: Callable[[], None] = lambda: None,
        max_output_delay_s: float = MAX_OUTPUT_DELAY_S,
    ) -> None:
        self._events = events or EventLog()
        self.by_name: Mapping[str, ModelPool] = {pool.name: pool for pool in pools}
        self._current_variants = current_variants
        self._router_id = router_id
        self._channels = channels
        self._count_breach = count_breach
        self._max_output_delay_s = max_output_delay_s
        self._links: dict[str, tuple[ExecutorLink, asyncio.Task[None]]] = {}
        self._wanted: frozenset[str] = frozenset()
        self._links_changed = asyncio.Event()
        self.meters = VariantMeters()

    @property
    def variants(self) -> Variants:
        """The names that stand for several models, with those models."""
        return self._current_variants()

    def find(self, model: str, key: str = "", seen: frozenset[str] | None = None) -> ModelPool:
        """Returns the pool of the named model. If the name stands for several models, `key` selects the variant. If
        `model` is empty, returns the only pool. Raises `RequestError`; its text names only the models in `seen`, or all
        if `seen` is None."""
        variants = self.variants.get(model)
        if variants:
            return self.by_name[choose_variant(variants, key).model]
        (pool,) = self.find_all(model, seen)
        return pool

    def find_all(self, model: str, seen: frozenset[str] | None = None) -> tuple[ModelPool, ...]:
        """Returns every pool that a name can mean. Raises `RequestError` as `find`."""
        variants = self.variants
        if model in variants:
            return tuple(self.by_name[variant.model] for variant in variants[model])
        if model in self.by_name:
            return (self.by_name[model],)
        known = ", ".join(sorted(name for name in (*self.by_name, *variants) if seen is None or name in seen)) or "none"
        if not model:
            if len(self.by_name) == 1:
                return tuple(self.by_name.values())
            raise invalid(FieldViolation("model", f"must be one of {known}"))
        raise RequestError(
            Reason.UNKNOWN_MODEL,
            f"model: there is no model {model[:100]!r}; known: {known}",
            (FieldViolation("model", f"there is no model {model[:100]!r}; known: {known}"),),
        )

    def split_adapter(self, model: str) -> tuple[str, str]:
        """Returns the model and the adapter of a name `MODEL:ADAPTER`. Does not split the name of a known model."""
        base, _, adapter = model.rpartition(":")
        known = {*self.by_name, *self.variants}
        return (base, adapter) if adapter and model not in known and base in known else (model, "")

    def names_seen_by(self, caller: Caller, model: str = "") -> list[str]:
        """Returns the name that the caller gives or, if `model` is empty, all names that the caller may see. Raises
        `RequestError`."""
        if model:
            return [model_of(caller, model)]
        return [name for name in (*self.by_name, *self.variants) if sees_model(caller, name)]

    def seen_by(self, caller: Caller, model: str = "") -> list[ModelPool]:
        """Returns the pools of `names_seen_by`, ordered by name. Raises `RequestError`."""
        names = self.names_seen_by(caller, model)
        pools = {pool.name: pool for name in names for pool in self.find_all(name, caller.models)}
        return [pool for _, pool in sorted(pools.items())]

    async def run(self, addresses: Sequence[str], resolve_interval_s: float) -> None:
        """Runs the dispatchers and links executors until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for pool in self.by_name.values():
                tasks.create_task(pool.dispatcher.run(), name=f"pool {pool.name}")
            async for current in watch(addresses, resolve_interval_s):
                self._follow(current, tasks)

    def _follow(self, addresses: frozenset[str], tasks: asyncio.TaskGroup) -> None:
        """Links new addresses. The link of an address that is no longer resolved is dropped once it is down."""
        self._wanted = addresses
        for address in addresses - self._links.keys():
            link = ExecutorLink(address, self._router_id, self, self._channels, self._max_output_delay_s)
            self._links[address] = (link, tasks.create_task(link.run(), name=f"link {address}"))
        for address in self._links.keys() - addresses:
            if not self._links[address][0].is_up:
                self._let_go(address)

    def _let_go(self, address: str) -> None:
        _, task = self._links.pop(address)
        task.cancel()

    def unused(self, model: str) -> list[ExecutorLink]:
        """Returns the links to executors of a model that are not used although they can be reached."""
        links = (link for link, _ in self._links.values() if link.problem and link.description.model == model)
        return sorted(links, key=lambda link: (link.executor_id, link.address))

    async def readiness_changed(self) -> bool:
        """Waits until a link comes up or breaks. Returns whether any model has an executor."""
        await self._links_changed.wait()
        self._links_changed.clear()
        return any(pool.links for pool in self.by_name.values())

    async def close(self) -> None:
        """Settles the placements that have ended, if the ledger answers now."""
        for pool in self.by_name.values():
            await pool.dispatcher.close()

    def on_linked(self, link: ExecutorLink) -> LinkEvents | str:
        pool = self.by_name.get(link.description.model)
        if pool is None:
            return f"it serves {link.description.model}, this router {', '.join(sorted(self.by_name))}"
        size = link.description.vocabulary_size
        if size < pool.text.num_base_tokens:
            return f"its vocabulary of {size} is smaller than the tokenizer's of {pool.text.num_base_tokens}"
        known = pool.dispatcher.link_of(link.executor_id)
        if known is not None and known is not link:
            if known.description.generation >= link.description.generation:
                return _same_id(link, known)
            # As in the ledger, the newest start counts: it may be a restart at another address.
            known.end()
        for other in pool.links:
            if other is known:
                continue
            for field in ("block_size", "vocabulary_size"):
                ours, theirs = getattr(link.description, field), getattr(other.description, field)
                if ours != theirs:
                    return f"its {field} is {ours}, that of executor {other.executor_id} is {theirs}"
        if size < pool.text.vocabulary_size:
            # A token was added to the tokenizer, often for padding, and the model was not made larger.
            log.warning(
                "model %s: the tokenizer has %d ids, executor %s %d; prompts with an id from %d on are refused",
                pool.name,
                pool.text.vocabulary_size,
                link.executor_id,
                size,
                size,
            )
        _warn_of_differences(pool, link)
        pool.dispatcher.on_linked(link)
        self._events.executor_linked(link.executor_id, pool.name)
        self._links_changed.set()
        return _PoolLinks(pool, self._events, self._unlinked)

    def on_breach(self, link: ExecutorLink) -> None:
        self._count_breach()

    def _unlinked(self, link: ExecutorLink) -> None:
        self._links_changed.set()
        if link.address in self._links and link.address not in self._wanted:
            self._let_go(link.address)


def _same_id(link: ExecutorLink, known: ExecutorLink) -> str:
    if known.description.generation == link.description.generation:
        return f"it is linked already, at {known.address}"
    text = f"the executor at {known.address} has the same id and started later"
    return f"{text}; give each executor an --executor-id of its own"


def _warn_of_differences(pool: ModelPool, link: ExecutorLink) -> None:
    """Logs differences of settings that affect tokens between an executor and another one of the same model."""
    other = next(iter(pool.links), None)
    if other is None:
        return
    ours, theirs = _token_settings(link.description), _token_settings(other.description)
    differing = [f"{name} ({ours[name]} and {theirs[name]})" for name in ours if ours[name] != theirs[name]]
    if differing:
        log.warning(
            "executors %s and %s of model %s differ in %s: a request that moves from one to the other may continue "
            "with other tokens",
            link.executor_id,
            other.executor_id,
            pool.name,
            ", ".join(differing),
        )


def _token_settings(description: executor_pb2.DescribeResponse) -> dict[str, str]:
    return {
        "model_revision": description.model_revision,
        "dtype": description.dtype,
        "weight_dtype": description.weight_dtype or description.dtype,
        "kv_cache_dtype": description.kv_cache_dtype or description.dtype,
        "pooling": " ".join(str(description.pooling).split()),
        "context_length": str(description.context_length),
        "eos_token_ids": ", ".join(map(str, sorted(description.eos_token_ids)[:MAX_LISTED])),
        "default_sampling": " ".join(str(description.default_sampling).split())[:MAX_LISTED_CHARACTERS],
    }


@dataclass(frozen=True, slots=True)
class _PoolLinks:
    """Passes the events of one pool's links to its dispatcher and the event log. Implements `LinkEvents`."""

    pool: ModelPool
    events: EventLog
    unlinked: Callable[[ExecutorLink], None]

    def on_request(self, link: ExecutorLink, stream: RequestStream, event: LinkEvent) -> None:
        if isinstance(event, SequenceEnded) and event.is_stall:
            self.events.engine_stalled(link.executor_id, self.pool.name)
        self.pool.dispatcher.on_request(stream, event)

    def on_report(self, link: ExecutorLink, report: executor_pb2.Report) -> None:
        self.events.executor_reported(
            link.executor_id, self.pool.name, is_draining=report.draining, num_preemptions=report.num_preemptions
        )
        self.pool.dispatcher.on_report(link, report)

    def on_usage(self, link: ExecutorLink, usage: executor_pb2.UsageReport) -> None:
        self.pool.dispatcher.on_usage(link, usage)

    def on_unlinked(self, link: ExecutorLink, streams: Sequence[RequestStream]) -> None:
        self.events.executor_lost(link.executor_id, self.pool.name, len(streams))
        self.pool.dispatcher.on_unlinked(link, streams)
        self.unlinked(link)


class VariantMeter:
    """Measurements of one model under one name."""

    def __init__(self) -> None:
        self._num_requests = 0
        self._num_refused = 0
        self._num_ended = 0
        self._output_tokens = 0
        self._ttft_ms: deque[float] = deque(maxlen=NUM_KEPT_LATENCIES)
        self._inter_token_ms: deque[float] = deque(maxlen=NUM_KEPT_LATENCIES)

    def arrive(self) -> None:
        """Counts a request."""
        self._num_requests += 1

    def refuse(self) -> None:
        """Counts a refusal."""
        self._num_refused += 1

    def end(self, stream: RequestStream, *others: RequestStream) -> None:
        """Records the end of a request. `stream` is its first choice, whose latencies are recorded."""
        clock, num_tokens = stream.clock, len(stream.output_ids)
        self._num_ended += 1
        self._output_tokens += num_tokens + sum(len(other.output_ids) for other in others)
        if clock.first_token is None or clock.last_token is None:
            return
        self._ttft_ms.append((clock.first_token - clock.arrived) * 1000)
        if num_tokens > 1:
            self._inter_token_ms.append((clock.last_token - clock.first_token) * 1000 / (num_tokens - 1))

    def to_proto(self, model: str, variant: Variant, share: float) -> inference_pb2.VariantCapacity:
        """Returns the measurements as a message."""
        capacity = inference_pb2.VariantCapacity(
            model=model,
            variant=variant.model,
            share=share,
            num_requests=self._num_requests,
            num_refused=self._num_refused,
            num_ended=self._num_ended,
            output_tokens=self._output_tokens,
        )
        if self._ttft_ms:
            capacity.ttft_p50_ms = percentile(self._ttft_ms, 0.5)
            capacity.ttft_p99_ms = percentile(self._ttft_ms, 0.99)
        if self._inter_token_ms:
            capacity.inter_token_p50_ms = percentile(self._inter_token_ms, 0.5)
            capacity.inter_token_p99_ms = percentile(self._inter_token_ms, 0.99)
        return capacity


class VariantMeters:
    """The meters by requested name and model. Only names that the router serves get a meter, so their number is
    bounded."""

    def __init__(self) -> None:
        self._meters: dict[tuple[str, str], VariantMeter] = {}

    def meter(self, model: str, variant: str) -> VariantMeter:
        """Returns the meter of a model under a name."""
        return self._meters.setdefault((model, variant), VariantMeter())

    def to_proto(self, model: str, variants: tuple[Variant, ...]) -> Iterable[inference_pb2.VariantCapacity]:
        """Yields the measurements of a name's models."""
        for variant in variants:
            yield self.meter(model, variant.model).to_proto(model, variant, share_of(variant, variants))


def percentile(values: Iterable[float], fraction: float) -> float:
    """Returns the smallest value that is not exceeded by at least `fraction` of all values."""
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * fraction // 1) - 1)]


@dataclass(frozen=True, slots=True)
class Adapter:
    """The content that new requests for a name get. `num_executors` executors serve it. `num_resident` of them have it
    in a slot."""

    name: str
    hash: str
    rank: int
    num_executors: int
    num_resident: int


def adapters_of(reports: Iterable[executor_pb2.Report]) -> dict[str, Adapter]:
    """Returns the adapters by name, ordered by name.

    If a name has several contents, the one that most executors serve without draining is chosen. Ties are decided by
    the number of all executors that serve the content, then by the larger hash, so that routers with the same reports
    make the same choice.
    """
    found: dict[str, dict[str, list[tuple[bool, executor_pb2.AdapterStatus]]]] = {}
    for report in reports:
        for status in report.adapters:
            found.setdefault(status.name, {}).setdefault(status.hash, []).append((not report.draining, status))
    return {name: _most_served(found[name]) for name in sorted(found)}


def _most_served(contents: dict[str, list[tuple[bool, executor_pb2.AdapterStatus]]]) -> Adapter:
    def order(adapter_hash: str) -> tuple[int, int, str]:
        serving = contents[adapter_hash]
        return sum(accepts for accepts, _ in serving), len(serving), adapter_hash

    statuses = [status for _, status in contents[max(contents, key=order)]]
    first = statuses[0]
    return Adapter(first.name, first.hash, first.rank, len(statuses), sum(status.resident for status in statuses))


def unknown_adapter(model: str, name: str, known: Iterable[str]) -> RequestError:
    """Returns the error for a name that no executor of the model reports."""
    names = sorted(known)
    listed = ", ".join(names[:MAX_LISTED_NAMES]) + (", …" if len(names) > MAX_LISTED_NAMES else "") or "none"
    return RequestError(
        Reason.UNKNOWN_ADAPTER,
        f"adapter_id: model {model} has no adapter {name[:100]!r}; its adapters: {listed}",
        (FieldViolation("adapter_id", f"there is no adapter {name[:100]!r} of {model}; its adapters: {listed}"),),
    )
