"""The executor's edges: submits, KV size, the machine's limits."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from inflight.common.kv_size import KvBudget, num_host_kv_blocks, num_kv_blocks
from inflight.common.machine import (
    RESERVED_FILES,
    max_client_connections,
    num_available_memory_bytes,
    num_usable_cores,
    raise_open_files_limit,
)
from inflight.common.process import EXIT_BAD_SETTING, run_process
from inflight.common.protocol import MAX_GRAMMAR_BYTES
from inflight.common.settings import SettingError
from inflight.executor.serving.submission import SubmissionError, SubmissionLimits, sequence_from_submit
from inflight.gateway.main import check_connections
from inflight.gateway.settings import GatewaySettings
from inflight.v1 import executor_pb2, types_pb2

LIMITS = SubmissionLimits(context_length=32, vocabulary_size=100, eos_token_ids=frozenset({2}))


def make_submit(**changes: object) -> executor_pb2.Submit:
    submit = executor_pb2.Submit(
        request_id="r",
        attempt=1,
        prompt_ids=[1, 2, 3],
        sampling=types_pb2.SamplingParams(temperature=0.5, top_k=3, top_p=0.5, seed=9),
        stopping=types_pb2.StoppingParams(max_tokens=8, stop_token_ids=[7]),
        reserved_blocks=4,
        cache_salt=b"tenant",
        num_choices=1,
    )
    submit.MergeFrom(executor_pb2.Submit(**changes))  # type: ignore[arg-type]
    return submit


def test_submit_becomes_a_sequence_with_the_models_own_ends() -> None:
    sequence = sequence_from_submit(make_submit(prior_output_ids=[5]), LIMITS)
    assert sequence.token_ids == [1, 2, 3, 5]
    assert sequence.num_output_tokens == 1
    assert sequence.stopping.stop_token_ids == {2, 7}
    assert sequence.cache_salt == b"tenant"


def test_ignored_end_of_sequence_does_not_end_a_sequence() -> None:
    submit = make_submit(stopping=types_pb2.StoppingParams(ignore_eos=True))
    assert sequence_from_submit(submit, LIMITS).stopping.stop_token_ids == {7}


@pytest.mark.parametrize(
    ("priority", "expected"),
    [
        (types_pb2.PRIORITY_CLASS_UNSPECIFIED, 0),
        (types_pb2.PRIORITY_CLASS_INTERACTIVE, 1),
        (types_pb2.PRIORITY_CLASS_STANDARD, 0),
        (types_pb2.PRIORITY_CLASS_BATCH, -1),
    ],
)
def test_class_becomes_a_number_of_which_the_larger_is_served_first(
    priority: types_pb2.PriorityClass, expected: int
) -> None:
    assert sequence_from_submit(make_submit(priority=priority), LIMITS).priority == expected


def test_inter_token_target_is_the_requests_own_or_that_of_its_class() -> None:
    classes = (types_pb2.PRIORITY_CLASS_INTERACTIVE, types_pb2.PRIORITY_CLASS_STANDARD, types_pb2.PRIORITY_CLASS_BATCH)
    targets = [sequence_from_submit(make_submit(priority=each), LIMITS).inter_token_target_ms for each in classes]
    assert targets == [50.0, 100.0, None]
    assert sequence_from_submit(make_submit(inter_token_target_ms=20), LIMITS).inter_token_target_ms == 20


def test_stream_interval_beyond_what_a_frame_waits_for_is_refused() -> None:
    assert sequence_from_submit(make_submit(stream_interval=16), LIMITS)
    with pytest.raises(SubmissionError, match="stream_interval must be at most 16"):
        sequence_from_submit(make_submit(stream_interval=17), LIMITS)


@pytest.mark.parametrize("target_ms", [0, 60_001])
def test_inter_token_target_out_of_range_is_rejected(target_ms: int) -> None:
    with pytest.raises(SubmissionError, match=r"inter_token_target_ms must be in \[1, 60000\]"):
        sequence_from_submit(make_submit(inter_token_target_ms=target_ms), LIMITS)


def test_bypassed_cache_keeps_the_sequence_out_of_it() -> None:
    assert sequence_from_submit(make_submit(cache_bypass=True), LIMITS).cache_salt is None


@pytest.mark.parametrize(
    ("temperature", "expected"), [(0.0, 0.0), (1e-40, 0.0), (9e-6, 0.0), (1e-5, pytest.approx(1e-5)), (0.5, 0.5)]
)
def test_a_temperature_near_0_is_greedy_in_every_backend(temperature: float, expected: object) -> None:
    submit = make_submit(sampling=types_pb2.SamplingParams(temperature=temperature))
    assert sequence_from_submit(submit, LIMITS).sampling.temperature == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_ids": [100]},
        {"prior_output_ids": [1] * 8},
        {"stopping": types_pb2.StoppingParams(max_tokens=30)},
        {"stopping": types_pb2.StoppingParams(stop_token_ids=[100])},
        {"stopping": types_pb2.StoppingParams(stop_token_ids=[1] * 256)},
        {"sampling": types_pb2.SamplingParams(temperature=float("nan"))},
        {"sampling": types_pb2.SamplingParams(temperature=-1.0)},
        {"sampling": types_pb2.SamplingParams(top_p=0.0)},
        {"sampling": types_pb2.SamplingParams(top_k=-1)},
        {"num_top_logprobs": 21},
        {"num_prompt_logprobs": 21},
        {"constraint": executor_pb2.GrammarConstraint(grammar="{}", hash=b"not its SHA-256")},
        {"constraint": executor_pb2.GrammarConstraint(grammar="{" * (MAX_GRAMMAR_BYTES + 1))},
    ],
)
def test_impossible_submit_is_invalid(changes: dict[str, object]) -> None:
    with pytest.raises(SubmissionError) as error:
        sequence_from_submit(make_submit(**changes), LIMITS)
    assert error.value.reason == executor_pb2.REJECT_REASON_INVALID


@pytest.mark.parametrize(
    "changes",
    [
        {"num_choices": 2},
        {"sampling": types_pb2.SamplingParams(typical_p=0.5)},
    ],
)
def test_what_is_not_built_is_unsupported(changes: dict[str, object]) -> None:
    with pytest.raises(SubmissionError) as error:
        sequence_from_submit(make_submit(**changes), LIMITS)
    assert error.value.reason == executor_pb2.REJECT_REASON_UNSUPPORTED


def test_kv_pool_takes_the_tokens_asked_for_or_the_share_of_what_is_free() -> None:
    assert num_kv_blocks(KvBudget(max_tokens=100, free_bytes=10_000, fraction=0.5), 16, 10) == 6
    assert num_kv_blocks(KvBudget(max_tokens=0, free_bytes=10_000, fraction=0.5), 16, 10) == 500


@pytest.mark.parametrize("budget", [KvBudget(1600, 900, 0.5), KvBudget(8, 10_000, 0.5), KvBudget(0, 15, 0.5)])
def test_kv_pool_without_room_is_an_error_that_says_what_to_change(budget: KvBudget) -> None:
    with pytest.raises(SettingError, match="max_tokens_in_paged_kv_cache"):
        num_kv_blocks(budget, 16, 10)


def test_host_memory_for_kv_is_counted_in_blocks() -> None:
    assert num_host_kv_blocks(1005, bytes_per_block=10, free_bytes=1000) == 100
    assert num_host_kv_blocks(0, bytes_per_block=10, free_bytes=-5) == 0


@pytest.mark.parametrize(("num_bytes", "why"), [(9, "holds no block"), (1010, "more than the 1000 bytes")])
def test_host_memory_that_does_not_fit_is_an_error_that_names_the_setting(num_bytes: int, why: str) -> None:
    with pytest.raises(SettingError, match=f"kv_cache_host_memory_bytes={num_bytes} .*{why}"):
        num_host_kv_blocks(num_bytes, bytes_per_block=10, free_bytes=1000)


GB = 1024**3
MOUNT_2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"
MOUNTS_1 = """\
31 30 0:27 {shown} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
32 30 0:28 {shown} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"""
NO_LIMIT_1 = str(2**63 - 4096)
GROUP_1, GROUP_2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
HOST = {"proc/meminfo": f"MemTotal: {64 * GB // 1024} kB\nMemAvailable: {32 * GB // 1024} kB\n"}


def machine(root: Path, files: Mapping[str, object]) -> Path:
    """The files of a system."""
    for name, content in (HOST | dict(files)).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(content))
    return root


def group_2(path: str, limit: object, used: int, inactive: int = 0, high: object = "max") -> dict[str, object]:
    folder = f"{GROUP_2}/{path}".rstrip("/")
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.high": high,
        f"{folder}/memory.current": used,
        f"{folder}/memory.stat": f"anon {used - inactive}\nfile 9\ninactive_file {inactive}\nactive_file 4096",
    }


def group_1(path: str, limit: object, used: int, inactive: int = 0, around: object = NO_LIMIT_1) -> dict[str, object]:
    folder = f"{GROUP_1}/{path}".rstrip("/")
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": used,
        f"{folder}/memory.stat": f"inactive_file 7\nhierarchical_memory_limit {around}\ntotal_inactive_file {inactive}",
    }


def of_version_2(path: str, **groups: dict[str, object]) -> dict[str, object]:
    files: dict[str, object] = {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": MOUNT_2}
    return files | {name: content for group in groups.values() for name, content in group.items()}


def of_version_1(path: str, shown: str = "/", **groups: dict[str, object]) -> dict[str, object]:
    files: dict[str, object] = {
        "proc/self/cgroup": f"9:memory:{path}\n5:cpu,cpuacct:{path}\n0::/\n",
        "proc/self/mountinfo": MOUNTS_1.format(shown=shown),
    }
    return files | {name: content for group in groups.values() for name, content in group.items()}


@pytest.mark.parametrize(
    ("files", "free_gb"),
    [
        pytest.param({}, 32, id="no control groups"),
        pytest.param(of_version_2("/", own=group_2("", "max", 4 * GB)), 32, id="no limit"),
        pytest.param(of_version_2("/", own=group_2("", 8 * GB, 3 * GB)), 5, id="container"),
        pytest.param(of_version_2("/", own=group_2("", 8 * GB, 7 * GB, inactive=4 * GB)), 5, id="page cache"),
        pytest.param(of_version_2("/", own=group_2("", 8 * GB, 9 * GB)), 0, id="nothing left"),
        pytest.param(of_version_2("/", own=group_2("", "max", 3 * GB, high=6 * GB)), 3, id="throttled from 6 GB on"),
        pytest.param(
            of_version_2("/system.slice/a b.service", own=group_2("system.slice/a b.service", 4 * GB, GB)),
            3,
            id="systemd unit",
        ),
        pytest.param(
            of_version_2("/a/b/c", own=group_2("a/b/c", "max", GB), around=group_2("a", 6 * GB, 5 * GB, inactive=GB)),
            2,
            id="limit of a group around it",
        ),
        pytest.param(of_version_2("/../other", own=group_2("", 8 * GB, 3 * GB)), 5, id="outside of what it sees"),
        pytest.param(of_version_1("/", own=group_1("", NO_LIMIT_1, 4 * GB)), 32, id="version 1, no limit"),
        pytest.param(
            of_version_1("/docker/1", own=group_1("docker/1", 8 * GB, 6 * GB, inactive=2 * GB)), 4, id="version 1"
        ),
        pytest.param(
            of_version_1("/docker/1", "/docker/1", own=group_1("", 8 * GB, 6 * GB)), 2, id="version 1, container"
        ),
        pytest.param(
            of_version_1("/pod/1", own=group_1("pod/1", NO_LIMIT_1, GB), around=group_1("pod", 4 * GB, 3 * GB)),
            1,
            id="version 1, limit of a group around it",
        ),
        pytest.param(
            of_version_1("/pod/1", "/pod/1", own=group_1("", NO_LIMIT_1, GB, around=4 * GB)),
            3,
            id="version 1, limit of a group that it does not see",
        ),
    ],
)
def test_memory_is_what_the_control_groups_leave(tmp_path: Path, files: dict[str, object], free_gb: int) -> None:
    assert num_available_memory_bytes(machine(tmp_path, files)) == free_gb * GB


def test_memory_is_unknown_where_the_system_does_not_report_it(tmp_path: Path) -> None:
    assert num_available_memory_bytes(tmp_path) is None


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        pytest.param(of_version_2("/", own={f"{GROUP_2}/cpu.max": "max 100000"}), 4, id="no quota"),
        pytest.param(of_version_2("/", own={f"{GROUP_2}/cpu.max": "150000 100000"}), 2, id="container"),
        pytest.param(
            of_version_2("/a/b", own={f"{GROUP_2}/a/b/cpu.max": "max 100000", f"{GROUP_2}/a/cpu.max": "10000 100000"}),
            1,
            id="quota of a group around it",
        ),
        pytest.param(
            of_version_1(
                "/a",
                own={
                    f"{GROUP_2}/cpu,cpuacct/a/cpu.cfs_quota_us": "300000",
                    f"{GROUP_2}/cpu,cpuacct/a/cpu.cfs_period_us": "100000",
                    f"{GROUP_2}/cpu,cpuacct/cpu.cfs_quota_us": "-1",
                    f"{GROUP_2}/cpu,cpuacct/cpu.cfs_period_us": "100000",
                },
            ),
            3,
            id="version 1",
        ),
    ],
)
def test_cores_are_what_the_control_groups_leave(
    tmp_path: Path, files: dict[str, object], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    assert num_usable_cores(machine(tmp_path, files)) == cores


@pytest.fixture
def soft_limit() -> Iterator[int]:
    """A soft limit of open files below the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = 1024 if hard == resource.RLIM_INFINITY else min(1024, hard - 1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    yield low
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_process_may_open_as_many_files_as_the_hard_limit_allows(soft_limit: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert max_client_connections() == soft_limit - RESERVED_FILES
    assert run_process(lambda: max_client_connections()) == min(hard, 1024 * 1024) - RESERVED_FILES
    raise_open_files_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 1024 * 1024), hard)


def test_gateway_refuses_to_promise_more_requests_than_it_has_file_descriptors(
    soft_limit: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def start() -> int:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        check_connections(GatewaySettings(max_requests=soft_limit - RESERVED_FILES))
        check_connections(GatewaySettings(max_requests=soft_limit - RESERVED_FILES + 1))
        return 0

    assert run_process(start) == EXIT_BAD_SETTING
    refusal = capsys.readouterr().err
    assert "INFLIGHT_MAX_REQUESTS" in refusal
    assert "ulimit -n" in refusal
