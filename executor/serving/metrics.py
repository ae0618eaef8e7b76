"""Metrics of an executor; see `docs/metrics.md`.

Gauges are read at each scrape from the newest engine status. Steps are counted from their records, on the event loop's
thread, so the engine loop does no work for metrics.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from operator import attrgetter

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inflight.common.http.metrics_page import new_registry
from inflight.executor.engine.output import EngineStatus
from inflight.executor.scheduler.blocks import PoolCounts
from inflight.executor.scheduler.step_constraint import StepConstraint
from inflight.executor.scheduler.step_record import PART_NAMES, StepRecord
from inflight.executor.serving.service import ExecutorService

STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)
SEQUENCES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
TOKENS = (0, 1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PHASES = ("prefill", "decode")


def executor_metrics(service: ExecutorService) -> CollectorRegistry:
    """Returns a registry of the executor's metrics, and subscribes to its steps."""
    registry, model = new_registry(), service.description.model
    steps = StepMetrics(registry, model)
    service.steps.on_record = steps.observe
    registry.register(StandingMetrics(service, steps))
    return registry


class StepMetrics:
    """Histograms and sums over steps."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._step_s = Histogram(
            "inflight_step_seconds",
            "Step time: from the end of the previous step to the end of this one.",
            ["model"],
            buckets=STEP_S,
            registry=registry,
        ).labels(model)
        sequences = Histogram(
            "inflight_batch_sequences", "Sequences per step.", ["model", "phase"], buckets=SEQUENCES, registry=registry
        )
        tokens = Histogram(
            "inflight_batch_tokens", "Tokens per step.", ["model", "phase"], buckets=TOKENS, registry=registry
        )
        self._prefills, self._decodes = (sequences.labels(model, phase) for phase in PHASES)
        self._prefill_tokens, self._decode_tokens = (tokens.labels(model, phase) for phase in PHASES)
        self.part_s = dict.fromkeys(PART_NAMES, 0.0)
        self.prompt_tokens = 0
        self.output_tokens = 0

    def observe(self, record: StepRecord) -> None:
        plan = record.plan
        self._step_s.observe(sum(record.times))
        self._prefills.observe(plan.num_prefills)
        self._decodes.observe(plan.num_decodes)
        self._prefill_tokens.observe(plan.prefill_tokens)
        self._decode_tokens.observe(plan.num_decodes)
        for name, seconds in zip(PART_NAMES, record.part_s, strict=False):
            self.part_s[name] += seconds
        self.prompt_tokens += plan.boarded_prompt_tokens
        self.output_tokens += record.num_new_tokens


class StandingMetrics(Collector):
    """Metrics read from the engine's status at each scrape; none before the first status."""

    def __init__(self, service: ExecutorService, steps: StepMetrics) -> None:
        self._service = service
        self._steps = steps

    def collect(self) -> Iterator[Metric]:
        status = self._service.status
        if status is None:
            return
        yield from self._gauges(status)
        yield from self._kv_groups(status)
        yield from self._states(status)
        yield from self._counters(status)
        yield from self._split_counters(status)
        yield from self._vllm(status)
        yield from self._drafts(status)
        yield from self._adapters()

    def describe(self) -> Iterator[Metric]:
        """Yields nothing: the registry would scrape the executor before it has a status."""
        yield from ()

    def _gauges(self, status: EngineStatus) -> Iterator[Metric]:
        description, kv = self._service.description, status.kv
        figures = (
            ("seats", "Seats: maximum sequences per step.", description.max_num_sequences),
            ("seats_used", "Sequences with a seat.", status.num_running),
            ("sequences_waiting", "Accepted sequences without a seat.", _num_waiting(status)),
            ("sequences_preempted", "Preempted sequences that wait for a seat.", status.num_preempted),
            ("orphans", "Sequences whose router is gone.", self._service.num_orphans),
            ("blocks", "KV blocks in the pool.", status.total_blocks),
            ("blocks_used", "KV blocks that sequences hold.", status.used_blocks),
            ("blocks_reserved", "KV blocks reserved for the sequences held.", kv.reserved_blocks),
            ("blocks_cached", "KV blocks that hold a cached prefix.", kv.published_blocks),
            ("blocks_evictable", "Cached KV blocks that no sequence uses.", kv.evictable_blocks),
            ("host_blocks", "KV blocks in host memory.", description.host_blocks),
            ("host_blocks_used", "KV blocks in host memory with KV of preempted sequences.", status.used_host_blocks),
            ("host_prefix_blocks", "KV blocks in host memory with an evicted prefix.", kv.host_prefixes.num_blocks),
            (
                "draining",
                "1 if the executor accepts no new work, else 0.",
                int(status.draining or not self._service.takes_work),
            ),
        )
        return _families(GaugeMetricFamily, "inflight_", "model", description.model, figures)

    def _kv_groups(self, status: EngineStatus) -> Iterator[Metric]:
        """Yields the blocks of each KV pool: that of the layers that attend to the whole context, which is the only one
        unless layers with sliding windows have theirs."""
        kv, window = status.kv, status.kv.window
        groups = [("full", PoolCounts(status.total_blocks, kv.used_blocks, kv.evictable_blocks, kv.published_blocks))]
        if window is not None:
            groups.append(("window", window))
        for name, text, count in (
            ("blocks", "KV blocks of a group of layers.", attrgetter("total_blocks")),
            ("blocks_used", "KV blocks of a group that sequences hold.", attrgetter("used_blocks")),
            ("blocks_cached", "KV blocks of a group that hold a cached prefix.", attrgetter("published_blocks")),
            ("blocks_evictable", "Cached KV blocks of a group that no sequence uses.", attrgetter("evictable_blocks")),
        ):
            gauge = GaugeMetricFamily(f"inflight_kv_group_{name}", text, labels=["model", "group"])
            for group, counts in groups:
                gauge.add_metric([self._service.description.model, group], count(counts))
            yield gauge

    def _states(self, status: EngineStatus) -> Iterator[Metric]:
        """Yields the slots and checkpoints of recurrent state, of models that have such layers."""
        states, model = status.kv.states, self._service.description.model
        if states is None:
            return
        gauges = (
            ("state_slots", "Slots of recurrent state.", states.slots),
            ("state_slots_used", "Slots of recurrent state that sequences hold.", states.used_slots),
            ("state_checkpoints", "Checkpoints of recurrent state.", states.checkpoints),
            ("state_checkpoints_kept", "Checkpoints that hold the state of a prefix.", states.kept_checkpoints),
        )
        counters = (
            ("state_checkpoints_saved", "Checkpoints of prefixes that were saved.", states.saved),
            ("state_checkpoints_loaded", "Checkpoints that sequences boarded with.", states.loaded),
            ("state_checkpoints_dropped", "Checkpoints dropped for others or with their block.", states.dropped),
            ("state_prefix_kv_tokens", "Prompt tokens whose KV was found.", states.kv_tokens),
            ("state_prefix_usable_tokens", "Of these, tokens with a checkpoint behind them.", states.usable_tokens),
        )
        yield from _families(GaugeMetricFamily, "inflight_", "model", model, gauges)
        yield from _families(CounterMetricFamily, "inflight_", "model", model, counters)

    def _counters(self, status: EngineStatus) -> Iterator[Metric]:
        kv, host = status.kv, status.kv.host_prefixes
        busy_s = status.device_busy_s
        figures = (
            *([("device_busy_seconds", "Seconds in which the device computed.", busy_s)] if busy_s is not None else []),
            ("work_seconds", "Seconds in which the executor had work.", status.elapsed_s),
            ("preemptions", "Preemptions of sequences.", status.num_preemptions),
            ("computed_tokens", "Tokens computed, prompt and output.", status.computed_tokens),
            ("recomputed_tokens", "Tokens computed again after a preemption.", status.recomputed_tokens),
            ("prefix_query_tokens", "Prompt tokens looked up in the prefix cache.", kv.query_tokens),
            ("prefix_hit_tokens", "Prompt tokens found in the prefix cache.", kv.hit_tokens),
            ("host_prefix_hit_tokens", "Prompt tokens found in host memory.", host.hit_tokens),
            ("host_prefix_blocks_stored", "Evicted prefix blocks copied to host memory.", host.stored_blocks),
            ("host_prefix_blocks_restored", "Prefix blocks copied back from host memory.", host.restored_blocks),
            ("host_prefix_blocks_dropped", "Prefix blocks dropped from host memory for others.", host.dropped_blocks),
            (
                "executor_invalid_logits",
                "Sequences ended because the logits were NaN or -inf only.",
                status.num_invalid_logits,
            ),
        )
        return _families(CounterMetricFamily, "inflight_", "model", self._service.description.model, figures)

    def _split_counters(self, status: EngineStatus) -> Iterator[Metric]:
        model = self._service.description.model
        steps = CounterMetricFamily(
            "inflight_steps",
            "Steps, by the constraint that kept them from being larger.",
            labels=["model", "constraint"],
        )
        num_steps = dict(status.bounds)
        for constraint in StepConstraint:
            steps.add_metric([model, constraint.value], num_steps.get(constraint, 0))
        yield steps
        parts = CounterMetricFamily(
            "inflight_step_part_seconds", "Host time of the engine loop, by part.", labels=["model", "part"]
        )
        for name, seconds in self._steps.part_s.items():
            parts.add_metric([model, name], seconds)
        yield parts

    def _vllm(self, status: EngineStatus) -> Iterator[Metric]:
        """Yields metrics under vLLM's names, which autoscalers and load generators read."""
        model, steps = self._service.description.model, self._steps
        gauges = (
            ("num_requests_running", "Sequences with a seat.", status.num_running),
            ("num_requests_waiting", "Accepted sequences without a seat.", _num_waiting(status)),
            (
                "kv_cache_usage_perc",
                "Share of the KV blocks in use, 0 to 1.",
                status.used_blocks / status.total_blocks,
            ),
        )
        yield from _families(GaugeMetricFamily, "vllm:", "model_name", model, gauges)
        counters = (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", status.kv.query_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", status.kv.hit_tokens),
            ("num_preemptions", "Preemptions of sequences.", status.num_preemptions),
            ("prompt_tokens", "Prompt tokens of sequences that got a seat.", steps.prompt_tokens),
            ("generation_tokens", "Output tokens.", steps.output_tokens),
        )
        yield from _families(CounterMetricFamily, "vllm:", "model_name", model, counters)
        description = self._service.description
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Configuration of the KV cache, in labels; always 1.",
            labels=["model_name", "block_size", "num_gpu_blocks"],
        )
        config.add_metric([model, str(description.block_size), str(description.total_blocks)], 1)
        yield config

    def _adapters(self) -> Iterator[Metric]:
        """Yields the use of slots and adapters; nothing where the executor serves none."""
        store, model = self._service.adapters, self._service.description.model
        if store is None:
            return
        uses = store.uses()
        slots = (
            ("slots", "Slots for LoRA adapters.", store.num_slots),
            ("slots_used", "Slots with an adapter that is in the folder.", sum(use.is_resident for use in uses)),
            ("slots_held", "Slots for adapters that sequences hold.", store.num_held),
        )
        yield from _families(GaugeMetricFamily, "inflight_adapter_", "model", model, slots)
        seconds = CounterMetricFamily("inflight_adapter_load_seconds", "Seconds that loads took.", labels=["model"])
        seconds.add_metric([model], store.load_s)
        yield seconds
        sequences = GaugeMetricFamily(
            "inflight_adapter_sequences", "Sequences that hold an adapter.", labels=["model", "adapter"]
        )
        loads = CounterMetricFamily("inflight_adapter_loads", "Loads into a slot.", labels=["model", "adapter"])
        for use in uses:
            sequences.add_metric([model, use.name], use.num_sequences)
            loads.add_metric([model, use.name], use.num_loads)
        yield from (sequences, loads)
        # Endpoint pickers of the Gateway API choose a replica by it; the newest sample counts.
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "LoRA adapters that sequences hold, in labels; the value is the time.",
            labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
        )
        running = ",".join(use.name for use in uses if use.num_sequences)
        info.add_metric([str(store.num_slots), "", running], time.time())
        yield info

    def _drafts(self, status: EngineStatus) -> Iterator[Metric]:
        """Yields the counts of drafted tokens: by position under inflight's names, and in all under vLLM's."""
        model, drafts = self._service.description.model, status.drafts
        for prefix, label, name, text, counts in (
            ("inflight_", "model", "draft_tokens", "Drafted tokens that were verified.", drafts.verified),
            ("inflight_", "model", "draft_tokens_accepted", "Drafted tokens that were accepted.", drafts.accepted),
            (
                "vllm:",
                "model_name",
                "spec_decode_num_accepted_tokens_per_pos",
                "Drafted tokens that were accepted.",
                drafts.accepted,
            ),
        ):
            by_position = CounterMetricFamily(f"{prefix}{name}", f"{text} By position.", labels=[label, "position"])
            # A counter exists from the start, so that its rate includes the first draft.
            for position, count in enumerate(counts or (0,)):
                by_position.add_metric([model, str(position)], count)
            yield by_position
        totals = (
            ("num_drafts", "Drafts of which tokens were verified.", drafts.num_drafts),
            ("num_draft_tokens", "Drafted tokens that were verified.", drafts.num_verified),
            ("num_accepted_tokens", "Drafted tokens that were accepted.", drafts.num_accepted),
        )
        yield from _families(CounterMetricFamily, "vllm:spec_decode_", "model_name", model, totals)


def _num_waiting(status: EngineStatus) -> int:
    return status.num_waiting + status.num_preempted


def _families(
    family: type[GaugeMetricFamily | CounterMetricFamily],
    prefix: str,
    label: str,
    model: str,
    figures: Iterable[tuple[str, str, float]],
) -> Iterator[Metric]:
    """Yields a metric with one sample, that of the model, for each figure: its name, text and value."""
    for name, text, value in figures:
        metric = family(f"{prefix}{name}", text, labels=[label])
        metric.add_metric([model], value)
        yield metric
