"""`make gpu-session`: fifteen minutes of a GPU, what has the most value first.

Each stage is a benchmark of this repository with a limit of time. One that would not end before the session does is
left out and named. Reports lie in the folder of `--out`, written by each stage as it goes; the output of a stage is in
`STAGE.log` there, and `session.json` says how each went. `--dry` goes through the same stages on a CPU, with tiny
models.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from inflight.bench.gpu.engine.session import why_not

SESSION_S = 840.0
# Between SIGINT, at which a stage ends its processes, and SIGKILL.
STOP_S = 10.0
# The models lie in memory: a disk of 1 GB/s would take a minute for what a GPU loads in seconds.
MODELS = Path("/dev/shm/inflight-models")
PEERS = ("--modes", "engine,inflight,static", "--peer", "transformers")
# cuBLAS with one algorithm for all numbers of rows, as far as its workspace decides.
NO_SPLIT_K = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}


@dataclass(frozen=True, slots=True)
class Stage:
    """A module to run with arguments, at most `most_s` seconds. `dry` are further arguments of a dry run; None: a dry
    run leaves the stage out."""

    name: str
    most_s: float
    module: str
    arguments: tuple[str, ...]
    dry: tuple[str, ...] | None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a stage went: its exit status, None if it was not run, and the reason where that is not 0."""

    name: str
    status: int | None
    took_s: float
    reason: str = ""


def stages(models: Path, out: Path, device: str) -> tuple[Stage, ...]:
    """Returns the stages, in their order."""
    folders = "inflight.bench.gpu.model_folders"

    def stack(name: str, most_s: float, model: str, *flags: str, executor: str = "") -> Stage:
        common = ("bench", "--modes", "inflight", "--rounds", "1", "--out", str(out), "--name", f"gpu-session-{name}")
        places = ("--model", str(models / model), "--executor-args", f"--device {device} {executor}".strip())
        dry = ("--scale", "0.1", "--concurrency", "2", "--turns", "2", "--seats", "2")
        return Stage(name, most_s, "inflight.cli.main", (*common, *places, *flags), dry)

    loads = ("--seats", "256", "--concurrency", "1,32,256", "--turns", "3", "--stream-interval")
    chaos = ("--model", str(models / "1b"), "--seconds", "30", "--seats", "32", "--out", str(out / "chaos"))
    shared = f"--device {device} --device-index 0 --max-tokens-in-paged-kv-cache 100000"
    engine = ("--models", "1b", "--penalties", "--out", str(out))
    return (
        Stage("models", 100, folders, (str(models), "8b", "1b"), ("--tiny",)),
        Stage("tests", 170, "pytest", ("-q", "tests/gpu", "-n", "8", "--dist", "load", "--tb", "short"), None),
        stack("stack-8b", 220, "8b", *loads, "1,8"),
        stack("prompts-8b", 90, "8b", "--workload", "prefill", "--concurrency", "8", "--turns", "2"),
        Stage("chaos", 100, "inflight.bench.chaos", (*chaos, "--executor-args", shared), ("--seconds", "5")),
        Stage("invariance", 60, "inflight.bench.gpu.invariance", ("8b",), None),
        Stage("invariance-no-split-k", 60, "inflight.bench.gpu.invariance", ("8b",), None, NO_SPLIT_K),
        stack("fp8-8b", 120, "8b", *loads, "8", executor="--weight-dtype fp8 --kv-cache-dtype fp8"),
        Stage("models-experts", 120, folders, (str(models), "experts", "experts-fp8", "gpt-oss"), ("--tiny",)),
        stack("experts", 120, "experts", *loads, "8"),
        stack("experts-fp8", 120, "experts-fp8", *loads, "8"),
        stack("gpt-oss", 120, "gpt-oss", *loads, "8"),
        Stage("models-recurrent", 60, folders, (str(models), "qwen3.5-0.8b"), ("--tiny",)),
        stack("recurrent", 120, "qwen3.5-0.8b", *loads, "8"),
        Stage("models-hybrid", 100, folders, (str(models), "qwen3.6-fp8", "nemotron-3-nano"), ("--tiny",)),
        stack("hybrid-fp8", 120, "qwen3.6-fp8", *loads, "8"),
        stack("mamba2", 120, "nemotron-3-nano", *loads, "8"),
        stack("peers-1b", 120, "1b", *PEERS, "--seats", "64", "--concurrency", "64", "--turns", "2"),
        Stage("engine-1b", 100, "inflight.bench.gpu.main", engine, None),
    )


def run(stage: Stage, out: Path, *, is_dry: bool) -> Ended:
    """Runs a stage to its end, or to the end of its time."""
    further = stage.dry or () if is_dry else ()
    command = [sys.executable, "-P", "-m", stage.module, *stage.arguments, *further]
    began_s = time.monotonic()
    with (out / f"{stage.name}.log").open("w") as log:
        child = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **stage.environment},
            start_new_session=True,
        )
        reason = ""
        try:
            child.wait(stage.most_s)
        except subprocess.TimeoutExpired:
            reason = f"stopped after {stage.most_s:.0f} s"
            os.killpg(child.pid, signal.SIGINT)
            try:
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    took_s = round(time.monotonic() - began_s, 1)
    if child.returncode and not reason:
        lines = (out / f"{stage.name}.log").read_text(errors="replace").strip().splitlines()
        reason = lines[-1][-300:] if lines else "no output"
    return Ended(stage.name, child.returncode, took_s, reason)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the session; returns 1 if a stage failed or there is no GPU."""
    given = _parser().parse_args(argv)
    if not given.dry and (obstacle := why_not()) is not None:
        print(f"error: {obstacle}; --dry tries the session on a CPU", file=sys.stderr)
        return 1
    given.out.mkdir(parents=True, exist_ok=True)
    ends: list[Ended] = []
    began_s = time.monotonic()
    for stage in stages(given.models, given.out, "cpu" if given.dry else "cuda"):
        left_s = given.seconds - (time.monotonic() - began_s)
        if given.stages and stage.name not in given.stages:
            continue
        if given.dry and stage.dry is None:
            ends.append(Ended(stage.name, None, 0.0, "needs a GPU"))
        elif left_s < stage.most_s:
            ends.append(Ended(stage.name, None, 0.0, f"{left_s:.0f} s are left, and it may take {stage.most_s:.0f} s"))
        else:
            print(f"==> {stage.name}: at most {stage.most_s:.0f} s", flush=True)
            ends.append(run(stage, given.out, is_dry=given.dry))
        end = ends[-1]
        how = "left out" if end.status is None else f"exit status {end.status} after {end.took_s:.0f} s"
        print(f"    {end.name}: {how}{end.reason and f': {end.reason}'}", flush=True)
        (given.out / "session.json").write_text(json.dumps([asdict(one) for one in ends], indent=1) + "\n")
    return int(any(end.status for end in ends))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m inflight.bench.gpu.session", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--seconds", type=float, default=SESSION_S, metavar="S", help=f"of the session; default: {SESSION_S:.0f}")
    add("--out", type=Path, default=Path("run/gpu-session"), metavar="FOLDER", help="default: run/gpu-session")
    add("--models", type=Path, default=MODELS, metavar="FOLDER", help=f"where models are made; default: {MODELS}")
    add("--stages", type=lambda text: text.split(","), default=[], metavar="NAME,…", help="only these; default: all")
    add("--dry", action="store_true", help="on a CPU, with tiny models")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
