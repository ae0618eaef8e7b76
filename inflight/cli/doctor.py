"""`inflight doctor`: what this machine offers for serving, and what to do about what is missing.

Asks the modules that decide and repeats none of their rules. Every finding is independent, so one failure does not hide
the others.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from inflight.cli.console import EXIT_FAILURE, open_console
from inflight.cli.parser import CommandParser
from inflight.common.machine import num_available_memory_bytes, num_usable_cores
from inflight.common.model_source import ModelError, resolve_model
from inflight.local.redis_server import RedisStartError, find_redis_binary

CPUINFO = Path("/proc/cpuinfo")
PROGRAM_TIMEOUT_S = 10.0
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16", "i8mm", "sve")
PACKAGES = ("torch", "transformers", "grpcio", "redis")
PYTHON_CLASSIFIER = "Programming Language :: Python :: "
INSTALL = "pip install 'inflight[serve]'"
GIBIBYTE = 1 << 30

# Below this the default model, a runtime of Python and torch, and some KV do not fit.
MIN_MEMORY_BYTES = 2 * GIBIBYTE


# Importing vLLM takes many seconds; only its version is imported, and what an executor needs besides.
IMPORT_TIMEOUT_S = 120.0
CHECK_OF_VLLM = """
import importlib.util
import pathlib
try:
    from inflight.common.settings import SettingError
    from inflight.executor.vllm.internals import check_version
    import inflight.executor.vllm.main
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is missing: install inflight[vllm] there")
try:
    version = check_version()
except SettingError as error:
    raise SystemExit(str(error))
folder = pathlib.Path(importlib.util.find_spec("vllm").origin).parent
has_second = (folder / "v1/worker/gpu/sample/logits_processor").exists()
print(version if has_second else f"{version} (no exact_resume in its second model runner)")
"""


class Verdict(Enum):
    """The result of a check."""

    GOOD = "ok"
    SLOW = "slow"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `advice` says what to do."""

    subject: str
    text: str
    verdict: Verdict = Verdict.GOOD
    advice: str = ""


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 1 if something is missing that serving needs."""
    parser = CommandParser(
        prog="inflight doctor",
        description="Checks what this machine offers for serving, and which attention backend would be used.",
    )
    parser.add_argument(
        "--model", default="", metavar="MODEL", help="as for inflight up; default: SmolLM2-135M-Instruct"
    )
    parser.add_argument(
        "--engine-python",
        metavar="PATH",
        help="also check this Python for executors with vLLM as the engine; default: only one that has vLLM itself",
    )
    flags = parser.parse_args(argv)
    console = open_console()
    findings = [examine() for examine in examinations(flags.model)]
    if flags.engine_python is not None or importlib.util.find_spec("vllm") is not None:
        findings.append(vllm(flags.engine_python or sys.executable))
    console.print(findings_table(findings))
    for finding in findings:
        if finding.advice:
            console.print(f"{finding.subject}: {finding.advice}", soft_wrap=True)
    return EXIT_FAILURE if any(finding.verdict is Verdict.MISSING for finding in findings) else 0


def examinations(model: str) -> tuple[Callable[[], Finding], ...]:
    """Returns the checks, in order."""
    return (python, cores, memory, processor, gpu, compiler, *(package(name) for name in PACKAGES), redis_server,
            lambda: model_on_disk(model), lambda: weights(model), backend, lambda: weight_form(model))  # fmt: skip


def findings_table(findings: Sequence[Finding]) -> Table:
    """Returns a row per finding."""
    table = Table(box=None, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    styles = {Verdict.GOOD: "green", Verdict.SLOW: "yellow", Verdict.MISSING: "red"}
    for finding in findings:
        table.add_row(finding.subject, Text(finding.verdict.value, styles[finding.verdict]), finding.text)
    return table


def python() -> Finding:
    """Checks the interpreter against the versions that the tests pass with."""
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    tested = supported_versions(importlib.metadata.metadata("inflight").get_all("Classifier", ()))
    if ".".join(platform.python_version_tuple()[:2]) not in tested:
        text += f"; tested with {', '.join(tested)}"
    return Finding("python", text)


def supported_versions(classifiers: Iterable[str]) -> list[str]:
    """Returns the versions of Python that a package's classifiers name."""
    return [one.removeprefix(PYTHON_CLASSIFIER) for one in classifiers if one.startswith(PYTHON_CLASSIFIER)]


def cores() -> Finding:
    """Counts the cores that this process may use, of those that the machine has."""
    return Finding("cores", f"{num_usable_cores()} usable of {os.cpu_count()}")


def memory() -> Finding:
    """Checks free memory."""
    available = num_available_memory_bytes()
    if available is None:
        return Finding("memory", "the system does not report free memory")
    text = f"{available / GIBIBYTE:.1f} GiB free"
    if available >= MIN_MEMORY_BYTES:
        return Finding("memory", text)
    return Finding("memory", text, Verdict.SLOW, "the smallest models need about 2 GiB")


def processor(cpuinfo: Path = CPUINFO) -> Finding:
    """Checks the processor, and the instruction sets that the kernels can use."""
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    values = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = (values.get("flags") or values.get("features") or "").split()
    name = values.get("model name") or platform.processor() or "unknown"
    return Finding("processor", f"{name}: {' '.join(f for f in CPU_FEATURES if f in flags) or 'features unknown'}")


def gpu() -> Finding:
    """Lists the GPUs that the driver reports."""
    program = shutil.which("nvidia-smi")
    listed = (
        None if program is None else _first_line([program, "--query-gpu=name,memory.total", "--format=csv,noheader"])
    )
    return Finding("gpu", listed or "none; models run on the CPU")


def compiler() -> Finding:
    """Checks for the C++ compiler that builds the attention op."""
    names = (os.environ.get("CXX"), "g++", "c++", "clang++")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        advice = "install g++ or clang++: without a compiler attention runs in plain torch, several times slower"
        return Finding("compiler", "none", Verdict.SLOW, advice)
    return Finding("compiler", f"{found}: {_first_line([found, '--version']) or 'version unknown'}")


def package(name: str) -> Callable[[], Finding]:
    """Returns the check of a package."""

    def examine() -> Finding:
        try:
            return Finding(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            return Finding(name, "not installed", Verdict.MISSING, INSTALL)

    return examine


def redis_server() -> Finding:
    """Checks for the Redis that a local stack would start."""
    try:
        return Finding("redis-server", str(find_redis_binary()))
    except RedisStartError as error:
        return Finding("redis-server", "none", Verdict.MISSING, str(error))


def model_on_disk(model: str) -> Finding:
    """Checks for the model that would be loaded."""
    try:
        source = resolve_model(model)
    except ModelError as error:
        return Finding("model", model or "the default model", Verdict.MISSING, str(error))
    return Finding("model", f"{source.name}: {source.gguf_file or source.folder}")


def weights(model: str) -> Finding:
    """Finds the format of the model's weights, and whether an executor reads it."""
    try:
        loading: Any = importlib.import_module("inflight.executor.formats.loading")
    except ImportError as error:
        return Finding("weights", f"the executor cannot be imported: {error}", Verdict.MISSING, INSTALL)
    try:
        return Finding("weights", loading.describe_weights(resolve_model(model)))
    except ModelError as error:
        return Finding("weights", "cannot be read", Verdict.MISSING, str(error))


def backend() -> Finding:
    """Finds the attention backend that an executor would choose here, and for which instructions it is built.

    Builds its kernels, as an executor would.
    """
    try:
        choice: Any = importlib.import_module("inflight.executor.attention.choice")
    except ImportError as error:
        return Finding("attention", f"the executor cannot be imported: {error}", Verdict.MISSING, INSTALL)
    torch = choice.torch
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = choice.choose_backend("auto", device, torch.bfloat16)
    return Finding("attention", chosen.reason, Verdict.SLOW if chosen.is_fallback else Verdict.GOOD)


def weight_form(model: str) -> Finding:
    """Measures in which form an executor with the settings of the environment would compute quantized weights."""
    try:
        return Finding("weight form", _measured_form(model))
    except ImportError as error:
        return Finding("weight form", f"the executor cannot be imported: {error}", Verdict.MISSING, INSTALL)
    except ModelError as error:
        return Finding("weight form", f"unknown: {error}")


def vllm(engine_python: str) -> Finding:
    """Checks whether a Python can run executors with vLLM as the engine: the packages of the extra, and the version of
    vLLM by the executor's own rule."""
    try:
        checked = subprocess.run(
            [engine_python, "-P", "-c", CHECK_OF_VLLM],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("vllm", engine_python, Verdict.MISSING, f"it does not run: {error}")
    said = [line for line in (checked.stderr + checked.stdout).splitlines() if line.strip()]
    if checked.returncode:
        reason = said[-1] if said else f"exit code {checked.returncode}"
        return Finding("vllm", f"no executor can run with {engine_python}", Verdict.MISSING, reason)
    warned = next((line for line in said if "is newer than" in line), "")
    verdict = Verdict.SLOW if warned else Verdict.GOOD
    return Finding("vllm", f"{said[-1]} in {engine_python}", verdict, warned)


def _measured_form(model: str) -> str:
    """Returns the choice in words. What an executor reads from weights is here read from the headers of their files."""
    imported = importlib.import_module
    forms: Any = imported("inflight.executor.cpu.weight_form")
    streams: Any = imported("inflight.executor.cpu.streams")
    choice: Any = imported("inflight.executor.attention.choice")
    device: Any = imported("inflight.executor.device")
    ranks: Any = imported("inflight.executor.ranks")
    sizing: Any = imported("inflight.tools.sizing.model_shape")
    settings: Any = imported("inflight.common.settings")
    kv_size: Any = imported("inflight.common.kv_size")
    own = ranks.with_step_tokens(settings.load(ranks.ExecutorSettings, "inflight doctor", []))
    if own.weight_dtype != "auto":
        return f"{own.weight_dtype}, as the settings ask"
    shape, place = sizing.read_model_shape(model), device.choose_device(own.device)
    coded = [weight for weight in shape.weights if weight.codes is not None]
    if not coded or shape.sizes is None:
        return "as in the checkpoint, which is not quantized"
    if place.type != "cpu":
        return "expanded, as always on a GPU"
    dtype = device.choose_dtype(own.dtype, place)
    backend = choice.choose_backend("auto", place, dtype, instructions=own.cpu_isa).backend
    if backend.name != "cpu":
        return "kept as in the checkpoint, because there are no kernels to measure"
    most = max(coded, key=lambda weight: weight.number).codes
    codes = streams.TrialCodes(most.bits, most.group_size, most.has_shifts)
    product = forms.product_of(shape.sizes.hidden, shape.sizes.inner, dtype, codes)
    kv_bytes = kv_size.kv_bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.head_dim * dtype.itemsize)
    dense_bytes = sum(weight.number for weight in coded) * dtype.itemsize
    quantized = forms.QuantizedModel(product, shape.num_layers, dense_bytes, kv_bytes, shape.context_length)
    dense = forms.trial_shape(product, forms.WeightForm.DENSE)
    stream = streams.choose_stream(backend.library, backend.pool, dense)
    measure = forms.measure_with(backend.library, backend.pool, stream)
    may_round, free_bytes = own.dtype != "float32", num_available_memory_bytes()
    return str(forms.choose_form(quantized, ranks.sizes_of(own), free_bytes, measure, may_round=may_round))


def _first_line(command: Sequence[str]) -> str | None:
    """Returns the first line that a program prints; `None` where it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(result.stdout.splitlines()), None)
