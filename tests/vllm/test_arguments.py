"""vLLM's flags from the settings of an executor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inflight.common.settings import SettingError
from inflight.executor.settings import ExecutorSettings
from inflight.executor.vllm.arguments import FLAGS, OF_THE_PROCESS, SWITCHES, engine_arguments

MODEL = Path("/models/m")
FIRST = ["--model", "/models/m", '--structured-outputs-config={"backend":"guidance"}']
FIRST += ["--scheduling-policy", "priority"]


def arguments(**settings: Any) -> list[str]:
    return engine_arguments(ExecutorSettings(engine="vllm", **settings), MODEL)


def test_defaults_are_left_to_vllm() -> None:
    assert arguments() == FIRST


def test_settings_come_before_the_users_own_flags_which_win() -> None:
    words = arguments(
        max_num_sequences=4,
        tensor_parallel_size=2,
        enable_kv_cache_reuse=False,
        engine_args='--max-num-seqs 8 --speculative-config \'{"method": "ngram"}\'',
    )
    assert words[len(FIRST) :] == [
        *("--max-num-seqs", "4", "--tensor-parallel-size", "2", "--no-enable-prefix-caching"),
        *("--max-num-seqs", "8", "--speculative-config", '{"method": "ngram"}'),
    ]


def test_folder_of_adapters_makes_vllm_serve_them() -> None:
    assert arguments(max_adapters=3) == FIRST
    words = arguments(adapter_folder=Path("/a"), max_adapters=3, max_adapter_rank=16)
    assert words[len(FIRST) :] == ["--enable-lora", "--max-loras", "3", "--max-lora-rank", "16"]


@pytest.mark.parametrize("flag", ["--model x", "--stream-interval=4", "--disable_log_stats"])
def test_flag_that_the_executor_sets_is_refused(flag: str) -> None:
    with pytest.raises(SettingError, match=r"engine_args: --[a-z-]+ is set by the executor"):
        arguments(engine_args=flag)


def test_unfinished_quote_is_refused() -> None:
    with pytest.raises(SettingError, match="engine_args: No closing quotation"):
        arguments(engine_args="--a 'b")


def test_setting_of_our_own_engine_is_refused_by_name() -> None:
    with pytest.raises(SettingError, match=r"batching, weight_dtype: not with engine=vllm"):
        arguments(weight_dtype="int8", batching="static")


def test_every_known_setting_exists() -> None:
    assert {*OF_THE_PROCESS, *FLAGS, *SWITCHES} <= ExecutorSettings.model_fields.keys()
