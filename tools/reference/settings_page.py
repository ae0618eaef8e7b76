"""Generator of docs/configuration.md: every setting of every process, from the classes that define them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator

from inflight.common.settings import ProcessSettings, SettingWords, words_of
from tools.reference.markdown import cell, notice, page, table

PACKAGES = ("router", "executor", "gateway")
REST = "Other"

# Where a setting stands on the page, by the beginning of its name; the first that fits. What fits nowhere is under
# `REST`, so that a new setting is never missing.
GROUPS = {
    "Addresses and names": "listen redis_url executors model served_model router_id executor_id resolve routers",
    "Device and model": "device dtype weight_dtype forward attention cpu_isa num_threads enable_cuda enable_overlap",
    "Batch and steps": "batching max_num num_standby enable_chunked max_inter_token inter_token_target max_sequence",
    "KV cache": "batch_scheduler_policy enable_kv_cache tokens_per_block max_tokens_in kv_cache_",
    "Admission": "max_queue_ max_bypass age_s preempt queue_event admission_ max_prompt max_att no_ default_ allow_",
    "Authentication and TLS": "insecure tls_ executor_tls_ router_tls_ router_names api_key jwt_ resume_secret cors",
    "Connections": "max_streams max_connection write_timeout handshake_timeout max_body max_req max_ch heartbeat body "
    "idle",
    "Resume, drain, failures": "resume_ttl orphan_ retain_ watchdog drain_",
    "Health, metrics, logs": "health_listen http_listen board otlp_ log_",
}

INTRODUCTION = """\
# Configuration

A process reads each setting from the first of these sources that has it:

1. its flag, such as `--max-num-sequences 64`
2. its environment variable, `INFLIGHT_` and the name in capitals
3. a TOML file, named by `--config FILE` or `INFLIGHT_CONFIG`
4. the default

These three lines have the same effect:

```console
$ inflight executor --insecure --max-num-sequences 64
$ INFLIGHT_INSECURE=true INFLIGHT_MAX_NUM_SEQUENCES=64 inflight executor
$ inflight executor --config executor.toml
```

```toml
# executor.toml
insecure = true
max_num_sequences = 64
```

- A boolean setting is a flag without a value; `--no-…` sets it to false. Lists are written `a,b,c`. An empty
  environment variable counts as unset.
- Settings are read once, at start. The log then shows every setting that differs from its default, with secrets masked.
- An invalid setting ends the process with exit code 2. The error names the setting and the allowed values.
- Files that settings name (certificates, keys, the admission file) are checked once a second and reloaded when they
  change, without a restart.
- `inflight up` passes settings on to the processes it starts: `--executor-args "…"`, `--router-args "…"`,
  `--gateway-args "…"`.

The environment variables of the client commands are in [client.md](client.md)."""


def settings_page() -> str:
    """The whole page."""
    parts = [notice("make docs-reference"), INTRODUCTION]
    for package, settings_class in settings_classes():
        parts += [f"## {package.capitalize()}", f"Settings of `inflight {package}`."]
        for group, words in grouped(words_of(settings_class)).items():
            rows = [[_names(word), cell(word.allowed), _default(word), cell(word.description)] for word in words]
            # The package's name in the heading keeps the anchors of several processes apart.
            parts += [f"### {group} ({package})", table(("setting", "allowed", "default", "description"), rows)]
    return page(*parts)


def settings_classes() -> Iterator[tuple[str, type[ProcessSettings]]]:
    """Each process's package with its class of settings."""
    for package in PACKAGES:
        if importlib.util.find_spec(f"inflight.{package}.settings") is None:
            continue
        module = importlib.import_module(f"inflight.{package}.settings")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, ProcessSettings) and value.__module__ == module.__name__:
                yield package, value


def grouped(all_words: list[SettingWords]) -> dict[str, list[SettingWords]]:
    """The settings by group, in the order of `GROUPS`; groups that have none are left out."""
    groups: dict[str, list[SettingWords]] = {group: [] for group in (*GROUPS, REST)}
    for words in all_words:
        groups[_group_of(words.name)].append(words)
    return {group: members for group, members in groups.items() if members}


def _group_of(name: str) -> str:
    return next((group for group, beginnings in GROUPS.items() if name.startswith(tuple(beginnings.split()))), REST)


def _names(words: SettingWords) -> str:
    return f"`{words.flag}`<br>`{words.variable}`"


def _default(words: SettingWords) -> str:
    if words.default == "required":
        return "required"
    value = words.default.removeprefix("default ")
    value = {"True": "true", "False": "false"}.get(value, value)
    return value if value in ("unset", "empty") else f"`{value}`"
