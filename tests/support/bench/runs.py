"""Finished runs for tests of reports."""

from __future__ import annotations

from inflight.bench.comparison.report import Report, Section, section_of
from inflight.bench.measures.run import NO_SLO, Outcome, Run, SeatSample, Slo, measure
from inflight.bench.workloads.generate import build_workload

WORKLOAD = build_workload("mixed", vocabulary_size=1000, scale=0.1, num_requests=3)
SECONDS = {
    "inflight": 2.0,
    "inflight-interval-8": 1.7,
    "inflight-int8": 1.0,
    "static": 6.0,
    "engine": 1.6,
    "engine-int8": 0.8,
    "vllm": 4.0,
}


def finished_run(mode: str, number: int, *errors: str, slo: Slo = NO_SLO) -> Run:
    """600 tokens in a time that depends on the mode; the later round is a little slower."""
    samples = tuple(SeatSample(at / 2, 1, 8, 8 - at, 3, 40, at * 10) for at in range(4))
    ttft_s = 0.26 if mode == "inflight" else 0.25
    outcomes = [Outcome(0.0, ttft_s, SECONDS[mode] * (1 + (number - 1) / 10), 600, (12.5, 20.0))]
    measures = measure(outcomes, samples, 100, slo)
    cores = {"router-0": 0.1, "executor-0": 1.7, "bench": 0.2}
    return Run(mode, number, measures, samples, errors, cores)


def section(*modes: str, num_rounds: int = 2) -> Section:
    """Every mode in every round of a small workload."""
    runs = tuple(finished_run(mode, number) for number in range(1, num_rounds + 1) for mode in modes)
    return section_of(WORKLOAD, runs)


def report(*modes: str) -> Report:
    """A report of one workload."""
    return Report({"model": "SmolLM2", "seats": "8"}, (section(*modes),), price_per_hour=0.36)
