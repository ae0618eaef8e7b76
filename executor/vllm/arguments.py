"""vLLM's command line, from the settings of the executor. Pure."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from inflight.common.settings import SettingError
from inflight.executor.settings import ExecutorSettings

# Settings of the process, which serves vLLM as it serves our own engine.
OF_THE_PROCESS = frozenset(
    {"engine", "engine_args", "listen", "model", "served_model_name", "executor_id", "device_index", "eos_token_ids"}
    | {"num_standby_sequences", "num_threads", "insecure", "tls_cert_file", "tls_key_file", "tls_ca_file"}
    | {"router_names", "health_listen", "http_listen", "otlp_endpoint", "orphan_grace_s", "retain_ended_s"}
    | {"watchdog_s", "drain_timeout_s", "log_level", "log_format"}
    # With a folder they are flags of vLLM, too.
    | {"adapter_folder", "max_adapters", "max_adapter_rank"}
)
# Settings that vLLM has under another name, with the same meaning.
FLAGS = {
    "max_num_sequences": "--max-num-seqs",
    "max_num_tokens": "--max-num-batched-tokens",
    "max_sequence_length": "--max-model-len",
    "tokens_per_block": "--block-size",
    "tensor_parallel_size": "--tensor-parallel-size",
    "dtype": "--dtype",
}
SWITCHES = {
    "enable_kv_cache_reuse": "--no-enable-prefix-caching",
    "enable_chunked_context": "--no-enable-chunked-prefill",
}
# What the executor decides itself: the model, and what it relies on.
OURS = frozenset({"--model", "--stream-interval", "--disable-log-stats", "--skip-tokenizer-init", "--tokens-only"})


def engine_arguments(settings: ExecutorSettings, model_folder: Path) -> list[str]:
    """Returns vLLM's flags: those of the settings, then those of `engine_args`, which win. Raises `SettingError` for a
    setting that means nothing to vLLM, or a flag that the executor sets itself."""
    changed = _changed(settings)
    unknown = sorted(changed.keys() - OF_THE_PROCESS - FLAGS.keys() - SWITCHES.keys())
    if unknown:
        raise SettingError(f"{', '.join(unknown)}: not with engine=vllm; give vLLM's own flags in engine_args")
    # Structured outputs come in llguidance's dialect of Lark, so llguidance compiles them.
    arguments = ["--model", str(model_folder), '--structured-outputs-config={"backend":"guidance"}']
    # The standby gets seats in order of class.
    arguments += ["--scheduling-policy", "priority"]
    for name, flag in FLAGS.items():
        if name in changed:
            arguments += [flag, str(changed[name])]
    arguments += [flag for name, flag in SWITCHES.items() if name in changed]
    if settings.adapter_folder is not None:
        arguments += ["--enable-lora", "--max-loras", str(settings.max_adapters)]
        arguments += ["--max-lora-rank", str(settings.max_adapter_rank)]
    return [*arguments, *_own_arguments(settings.engine_args)]


def _changed(settings: ExecutorSettings) -> dict[str, Any]:
    fields = type(settings).model_fields
    values = {name: getattr(settings, name) for name in fields}
    return {name: value for name, value in values.items() if value != fields[name].get_default()}


def _own_arguments(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SettingError(f"engine_args: {error}") from None
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if flag in OURS:
            raise SettingError(f"engine_args: {flag} is set by the executor")
    return words
