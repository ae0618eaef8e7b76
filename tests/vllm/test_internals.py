"""What is read of vLLM's objects, which stand here as plain ones with the same fields."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from inflight.common.settings import SettingError
from inflight.executor.scheduler.sequence import TokenLogprobs
from inflight.executor.vllm.backend import Produced, StepStats
from inflight.executor.vllm.internals import (
    REPLAY_PROCESSOR,
    REPLAY_PROCESSOR_V2,
    CachedBlocks,
    allow_replay,
    check_version,
    drop_prometheus,
    facts_of,
    produced_of,
    stats_of,
    take_tokens,
)


def logprob(value: float, rank: int) -> Any:
    return SimpleNamespace(logprob=value, rank=rank)


def output(**fields: Any) -> Any:
    choice = SimpleNamespace(token_ids=[5, 6], logprobs=None, finish_reason=None)
    given = {"outputs": [choice], "num_cached_tokens": 4, "prompt_logprobs": None, "prompt_token_ids": [1, 2, 3]}
    vars(choice).update({name: fields.pop(name) for name in tuple(fields) if name in vars(choice)})
    return SimpleNamespace(**{**given, **fields})


def test_tokens_and_end_are_taken() -> None:
    produced = produced_of(output(finish_reason="stop"), None, None)
    assert (produced.token_ids, produced.num_cached_tokens, produced.finish_reason) == ((5, 6), 4, "stop")
    assert (produced.logprobs, produced.prompt_logprobs) == ((), ())


def test_likeliest_tokens_are_sorted_and_the_sampled_one_is_not_among_them_unless_it_is_likely() -> None:
    rows = [{5: logprob(-4.0, 9), 8: logprob(-1.0, 2), 7: logprob(-0.5, 1)}, {6: logprob(-0.1, 1), 3: logprob(-3.0, 2)}]
    produced = produced_of(output(logprobs=rows), 2, None)
    assert produced.logprobs == (
        TokenLogprobs(-4.0, (7, 8), (-0.5, -1.0), 9),
        TokenLogprobs(-0.1, (6, 3), (-0.1, -3.0), 1),
    )


def test_only_the_chosen_token_is_asked_for_with_0() -> None:
    produced = produced_of(output(token_ids=[5], logprobs=[{5: logprob(-4.0, 9)}]), 0, None)
    assert produced.logprobs == (TokenLogprobs(-4.0, (), (), 9),)


def test_prompt_is_scored_from_its_second_token_on() -> None:
    rows = [None, {2: logprob(-1.0, 1)}, {3: logprob(-2.0, 4), 9: logprob(-0.2, 1)}]
    produced = produced_of(output(prompt_logprobs=rows), None, 1)
    assert produced.prompt_logprobs == (
        TokenLogprobs(-1.0, (2,), (-1.0,), 1),
        TokenLogprobs(-2.0, (9,), (-0.2,), 4),
    )


class Processor:
    """vLLM's `OutputProcessor`. What it gets waits in the request's collector until `read`."""

    def __init__(self, *names: str, prefilling: str = "") -> None:
        self.request_states = {
            f"{name}-1": SimpleNamespace(
                external_req_id=name, is_prefilling=name in prefilling, queue=SimpleNamespace(output=None)
            )
            for name in names
        }
        self.taken: list[tuple[str, Produced]] = []

        def taker(name: str) -> Callable[[Produced], None]:
            return lambda produced: self.taken.append((name, produced))

        take_tokens(self, {name: taker(name) for name in names})

    def process_outputs(self, outputs: Any, timestamp: float, statistics: Any = None) -> Any:
        for one in outputs:
            self.taken.append(("vLLM", Produced(tuple(one.new_token_ids))))
            if one.request_id in self.request_states:
                self.request_states[one.request_id].queue.output = one
        return timestamp, statistics

    def read(self) -> None:
        for one in self.request_states.values():
            one.queue.output = None


def step_output(name: str, *token_ids: int, **fields: Any) -> Any:
    given = {"request_id": f"{name}-1", "new_token_ids": list(token_ids)}
    return SimpleNamespace(**{**given, "finish_reason": None, "events": None, "new_logprobs": None, **fields})


def test_tokens_go_to_their_takers_behind_what_vllm_makes_objects_of() -> None:
    processor = Processor(*"abcdef", prefilling="b")
    others = (
        step_output("b", 2),
        step_output("c", 3, finish_reason="stop"),
        step_output("d", 4, events=[object()]),
        step_output("e", 5, new_logprobs=object()),
        step_output("unknown", 6),
    )
    outputs = [step_output("a", 1, 7), *others, step_output("f", 8)]
    assert processor.process_outputs(outputs, 0.5, statistics="some") == (0.5, "some")
    assert [name for name, _ in processor.taken] == ["vLLM"] * len(others) + ["a", "f"]
    assert processor.taken[-2:] == [("a", Produced((1, 7))), ("f", Produced((8,)))]


def test_tokens_wait_behind_an_output_that_was_not_read_yet() -> None:
    processor = Processor("a", "b")
    processor.process_outputs([step_output("a", 1, events=[object()])], 0.0)
    processor.process_outputs([step_output("a", 2), step_output("b", 3)], 0.0)
    processor.read()
    processor.process_outputs([step_output("a", 4)], 0.0)
    assert [(name, *one.token_ids) for name, one in processor.taken] == [("vLLM", 1), ("vLLM", 2), ("b", 3), ("a", 4)]


def event(kind: str, *hashes: int, **fields: Any) -> Any:
    return type(kind, (), {"block_hashes": list(hashes), **fields})()


def test_blocks_of_the_cache_are_counted_once_and_by_the_first_kind_of_layer() -> None:
    blocks = CachedBlocks()
    blocks.take(
        [event("BlockStored", 1, 2), event("BlockStored", 2, 3, group_idx=0), event("BlockStored", 9, group_idx=1)]
    )
    assert len(blocks) == 3
    blocks.take([event("BlockRemoved", 2), event("BlockRemoved", 3, group_idx=1), event("BlockRemoved", 7)])
    assert len(blocks) == 2
    blocks.take([event("AllBlocksCleared")])
    assert len(blocks) == 0


def scheduler_stats(**fields: Any) -> Any:
    prefix = SimpleNamespace(queries=10, hits=4)
    given = {"num_running_reqs": 2, "num_waiting_reqs": 1, "kv_cache_usage": 0.25, "prefix_cache_stats": prefix}
    return SimpleNamespace(**{**given, "spec_decoding_stats": None, **fields})


def test_statistics_of_a_step_without_output_are_those_of_the_scheduler() -> None:
    assert stats_of(scheduler_stats(), None) == StepStats(2, 1, 0.25, num_query_tokens=10, num_hit_tokens=4)


def test_drafts_are_counted_by_position_in_older_versions_too() -> None:
    drafts = SimpleNamespace(num_drafts=3, num_accepted_tokens_per_pos=[2, 1])
    iteration = SimpleNamespace(prompt_token_stats=SimpleNamespace(computed=7), num_preempted_reqs=1)
    stats = stats_of(scheduler_stats(spec_decoding_stats=drafts), iteration)
    assert (stats.drafted, stats.accepted, stats.num_prompt_tokens, stats.num_preemptions) == ((3, 3), (2, 1), 7, 1)


def test_metrics_that_nothing_reads_are_not_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    loggers: Any = ModuleType("vllm.v1.metrics.loggers")
    loggers.PrometheusStatLogger = type("PrometheusStatLogger", (), {})
    for name in ("vllm", "vllm.v1", "vllm.v1.metrics"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, loggers.__name__, loggers)
    ours = object()
    found = [ours, loggers.PrometheusStatLogger()]
    drop_prometheus(found)
    assert found == [ours]


def config(**changes: Any) -> Any:
    cache = SimpleNamespace(block_size=16, num_gpu_blocks=101, cache_dtype="auto", kv_cache_size_tokens=1600)
    parallel = SimpleNamespace(data_parallel_size=1, tensor_parallel_size=2)
    made = SimpleNamespace(
        cache_config=cache,
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=2048),
        model_config=SimpleNamespace(
            dtype="torch.bfloat16", quantization=None, max_model_len=512, get_vocab_size=lambda: 1000
        ),
        parallel_config=parallel,
        device_config=SimpleNamespace(device_type="cpu"),
        speculative_config=None,
        lora_config=None,
    )
    for path, value in changes.items():
        part, name = path.split("__")
        setattr(getattr(made, part) if part else made, name, value)
    return made


def test_facts_are_those_of_the_started_vllm() -> None:
    facts = facts_of(config(), "0.32.0")
    assert (facts.block_size, facts.num_blocks, facts.max_num_sequences, facts.context_length) == (16, 100, 4, 512)
    assert (facts.dtype, facts.weight_dtype, facts.kv_cache_dtype, facts.tensor_parallel_size) == (
        *("bfloat16", "bfloat16", "bfloat16"),
        2,
    )


def test_capacity_in_tokens_decides_where_layers_share_the_blocks() -> None:
    assert facts_of(config(cache_config__kv_cache_size_tokens=800), "").num_blocks == 50
    assert facts_of(config(cache_config__kv_cache_size_tokens=None), "").num_blocks == 100


def test_blocks_of_drafts_are_kept_back() -> None:
    drafting = SimpleNamespace(num_speculative_tokens=7)
    assert facts_of(config(__speculative_config=drafting), "").num_blocks == 100 - 4
    with pytest.raises(SettingError, match="too small"):
        facts_of(config(__speculative_config=drafting, cache_config__num_gpu_blocks=5), "")


def test_output_is_generated_again_where_vllm_takes_our_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    def allowed(**changes: Any) -> tuple[bool, list[str]]:
        made = config(**changes)
        made.model_config.logits_processors = ["a:B"]
        return allow_replay(made), made.model_config.logits_processors

    assert allowed() == (True, ["a:B", REPLAY_PROCESSOR])
    second = REPLAY_PROCESSOR_V2.partition(":")[0]
    monkeypatch.setitem(sys.modules, second, None)
    assert allowed(__use_v2_model_runner=True) == (False, ["a:B"])
    monkeypatch.setitem(sys.modules, second, ModuleType(second))
    assert allowed(__use_v2_model_runner=True) == (True, ["a:B", REPLAY_PROCESSOR_V2])
    assert allowed(__speculative_config=SimpleNamespace(num_speculative_tokens=1)) == (False, ["a:B"])


def test_slots_of_adapters_are_those_of_vllm() -> None:
    assert facts_of(config(), "").num_adapter_slots == 0
    assert facts_of(config(__lora_config=SimpleNamespace(max_loras=3)), "").num_adapter_slots == 3


def test_replicas_inside_vllm_are_refused() -> None:
    with pytest.raises(SettingError, match="data_parallel_size"):
        facts_of(config(parallel_config__data_parallel_size=2), "")


def use_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    module: Any = ModuleType("vllm.version")
    module.__version__, module.__version_tuple__ = version, (*map(int, version.split(".")),)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.version", module)


@pytest.mark.parametrize(
    ("version", "warns"), [("0.30.0", False), ("0.32.1", False), ("0.33.0", True), ("1.0.0", True)]
)
def test_supported_version_is_taken_and_a_newer_one_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, warns: bool
) -> None:
    use_version(monkeypatch, version)
    with caplog.at_level(logging.WARNING):
        assert check_version() == version
    assert ("newer than 0.32" in caplog.text) == warns


def test_old_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use_version(monkeypatch, "0.29.1")
    with pytest.raises(SettingError, match=r"vLLM 0\.29\.1 is too old; 0\.30 and later"):
        check_version()


def test_missing_vllm_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SettingError, match=r"inflight\[vllm\]"):
        check_version()
