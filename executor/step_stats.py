"""Records of steps and sequences as the protocol has them."""

from __future__ import annotations

from inflight.v1 import executor_pb2, stats_pb2

from executor.report import CONSTRAINT_PROTO, PHASE_PROTO
from executor.seating import SequenceStanding
from executor.step_record import PART_NAMES, KvCounts, PlanCounts, StepRecord


def iteration_stats(
    record: StepRecord, description: executor_pb2.DescribeResponse, clock_began_s: float
) -> stats_pb2.IterationStats:
    """A step. The loop's clock began at `clock_began_s`, in seconds since 1970."""
    exposed_s, busy_s = record.times
    return stats_pb2.IterationStats(
        iter=record.step,
        timestamp_ms=max(0, round((clock_began_s + record.ended_s) * 1000)),
        iter_latency_ms=(exposed_s + busy_s) * 1000,
        device_ms=busy_s * 1000,
        exposed_host_ms=exposed_s * 1000,
        parts=[
            stats_pb2.StepPart(name=name, ms=seconds * 1000)
            for name, seconds in zip(PART_NAMES, record.part_s, strict=True)
        ],
        num_active_requests=record.num_active,
        num_queued_requests=record.num_queued,
        max_num_active_requests=description.max_num_sequences,
        kv_cache_stats=_kv_stats(record.kv, description),
        inflight_batching_stats=_batching_stats(record.plan, record),
        constraint=CONSTRAINT_PROTO[record.plan.constraint],
    )


def _kv_stats(kv: KvCounts, description: executor_pb2.DescribeResponse) -> stats_pb2.KvCacheStats:
    return stats_pb2.KvCacheStats(
        max_num_blocks=description.total_blocks,
        free_num_blocks=kv.free_blocks,
        used_num_blocks=kv.used_blocks,
        evictable_num_blocks=kv.evictable_blocks,
        reserved_num_blocks=kv.reserved_blocks,
        tokens_per_block=description.block_size,
        prefix_query_tokens=kv.query_tokens,
        prefix_hit_tokens=kv.hit_tokens,
        cache_hit_rate=kv.hit_tokens / kv.query_tokens if kv.query_tokens else 0.0,
        used_host_blocks=kv.used_host_blocks,
    )


def _batching_stats(plan: PlanCounts, record: StepRecord) -> stats_pb2.InflightBatchingStats:
    return stats_pb2.InflightBatchingStats(
        num_scheduled_requests=plan.num_decodes + plan.num_prefills,
        num_context_requests=plan.num_prefills,
        num_gen_requests=plan.num_decodes,
        num_paused_requests=plan.num_paused,
        num_boarded_requests=plan.num_boarded,
        num_completed_requests=record.num_finished,
        num_ctx_tokens=plan.prefill_tokens,
        num_gen_tokens=record.num_new_tokens,
    )


def sequence_stats(standing: SequenceStanding) -> stats_pb2.SequenceStats:
    """A sequence that is held."""
    return stats_pb2.SequenceStats(
        request_id=standing.request_id,
        phase=PHASE_PROTO[standing.phase],
        seat=standing.seat,
        prompt_tokens=standing.prompt_tokens,
        computed_tokens=standing.computed_tokens,
        output_tokens=standing.output_tokens,
        num_blocks=standing.num_blocks,
        reserved_blocks=standing.reserved_blocks,
    )
