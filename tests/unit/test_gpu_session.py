"""`make gpu-session` without a GPU: its stages are benchmarks that take their arguments, and a dry run goes through."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inflight.bench.chaos.options import parse_options as parse_chaos
from inflight.bench.comparison.options import parse_options as parse_bench
from inflight.bench.gpu import session
from inflight.bench.gpu.main import _parser as engine_parser
from inflight.bench.gpu.model_folders import NAMES
from inflight.bench.gpu.session import Ended, Stage, main, run, stages

STAGES = stages(Path("models"), Path("out"), "cuda")


def test_stages_fit_the_session_as_far_as_they_have_priority() -> None:
    assert sum(stage.most_s for stage in STAGES[:7]) <= session.SESSION_S


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
@pytest.mark.parametrize("is_dry", [False, True])
def test_arguments_of_a_stage_are_those_of_its_benchmark(stage: Stage, is_dry: bool) -> None:
    arguments = [*stage.arguments, *(stage.dry or () if is_dry else ())]
    match stage.module.rpartition(".")[2]:
        case "model_folders":
            assert set(arguments[1:]) <= {*NAMES, "--tiny"}
        case "chaos":
            assert parse_chaos(arguments).executors == 2
        case "pytest":
            assert Path(arguments[1]).is_dir()
        case "invariance":
            assert arguments == ["8b"]
        case "main" if arguments[0] == "bench":
            assert "inflight" in parse_bench(arguments[1:]).modes
        case _:
            assert engine_parser().parse_args(arguments).models == "1b"


def test_session_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path / "out")]) == 1
    assert "--dry tries the session on a CPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_stage_ends_with_its_time_and_a_failure_names_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    (tmp_path / "failing.py").write_text("raise SystemExit('no such model')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    slow = run(Stage("slow", 0.2, "slow", (), None), tmp_path, is_dry=False)
    failing = run(Stage("failing", 60, "failing", (), None), tmp_path, is_dry=False)
    assert slow.status
    assert slow.reason == "stopped after 0 s"
    assert (failing.status, failing.reason) == (1, "no such model")


def test_stages_without_time_are_left_out_and_named(tmp_path: Path) -> None:
    assert main(["--dry", "--seconds", "1", "--out", str(tmp_path)]) == 0
    ends = [Ended(**end) for end in json.loads((tmp_path / "session.json").read_text())]
    assert [end.name for end in ends] == [stage.name for stage in STAGES]
    assert all(end.status is None for end in ends)
    assert ends[0].reason.endswith("s are left, and it may take 100 s")
    assert {end.name for end in ends if end.reason == "needs a GPU"} == {s.name for s in STAGES if s.dry is None}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("models", "stacks"), [("models", ["stack-8b"]), ("models-hybrid", ["hybrid-fp8", "mamba2"])])
def test_dry_run_measures_stacks_with_models_that_it_makes(models: str, stacks: list[str], tmp_path: Path) -> None:
    places = ["--out", str(tmp_path / "out"), "--models", str(tmp_path / "models")]
    status = main(["--dry", *places, "--stages", ",".join([models, *stacks])])
    assert status == 0, (tmp_path / "out" / "session.json").read_text()
    for stack in stacks:
        assert (tmp_path / "out" / f"gpu-session-{stack}.json").exists()
