"""Choice of the C++ build for a processor, and the errors of unusable ones."""

from __future__ import annotations

import platform
from pathlib import Path
from types import SimpleNamespace

import pytest

from inflight.executor.native import build, library
from inflight.executor.native.build import BuildFailure
from inflight.executor.native.library import NAMES, NativeLibrary, load_native, usable_instruction_sets
from inflight.executor.settings import ExecutorSettings

OLD = "fpu mmx fxsr sse sse2 ht syscall nx lm pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm"
HASWELL = f"{OLD} fma movbe aes xsave avx f16c rdrand abm bmi1 avx2 smep bmi2 erms invpcid"
ZEN_4 = f"{HASWELL} avx512f avx512dq avx512ifma avx512cd avx512bw avx512vl avx512_bf16 avx512vbmi avx512_vnni"
XEON = f"{ZEN_4} avx_vnni amx_bf16 avx512_fp16 amx_tile amx_int8"


@pytest.fixture(autouse=True)
def _x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


def cpuinfo_of(folder: Path, flags: str) -> Path:
    """What Linux says of a processor of two cores."""
    core = f"processor\t: {{}}\nmodel name\t: Some Processor\nflags\t\t: {flags}\nbogomips\t: 5000.00\n\n"
    path = folder / "cpuinfo"
    path.write_text("".join(core.format(i) for i in range(2)))
    return path


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (XEON, ["amx", "avx512_bf16", "avx512", "avx2", "plain"]),
        (ZEN_4, ["avx512_bf16", "avx512", "avx2", "plain"]),
        (HASWELL, ["avx2", "plain"]),
        (OLD, ["plain"]),
    ],
    ids=["amx xeon", "zen 4", "haswell", "old"],
)
def test_a_processor_gets_what_it_has_the_best_first(tmp_path: Path, flags: str, names: list[str]) -> None:
    usable = usable_instruction_sets(cpuinfo_of(tmp_path, flags))
    assert [instructions.name for instructions in usable] == names


def test_a_processor_that_the_system_says_nothing_of_gets_the_plain_build(tmp_path: Path) -> None:
    assert [instructions.name for instructions in usable_instruction_sets(tmp_path / "nothing")] == ["plain"]


def test_other_processors_get_a_build_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert [instructions.name for instructions in usable_instruction_sets()] == ["native"]


def test_instructions_that_the_processor_lacks_are_refused_with_those_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = cpuinfo_of(tmp_path, HASWELL)
    monkeypatch.setattr(library, "usable_instruction_sets", lambda: usable_instruction_sets(cpuinfo))
    assert load_native("amx") == BuildFailure("this processor has no amx; it has avx2, plain")
    assert load_native("mmx") == BuildFailure("this processor has no mmx; it has avx2, plain")


class FakeBuilds:
    """In the compiler's place: libraries of which some say that the system does not let them run."""

    def __init__(self, refused: set[str] | None = None, failure: str | None = None) -> None:
        self.refused = refused or set()
        self.failure = failure
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, name: str, sources: object, headers: object, flags: tuple[str, ...]) -> object:
        self.asked.append(flags)
        if self.failure is not None:
            return BuildFailure(self.failure)
        return SimpleNamespace(inflight_prepare=lambda: int(not self.refused.intersection(flags)))


@pytest.fixture
def _xeon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = cpuinfo_of(tmp_path, XEON)
    monkeypatch.setattr(library, "usable_instruction_sets", lambda: usable_instruction_sets(cpuinfo))


@pytest.mark.usefixtures("_xeon")
def test_a_build_that_the_system_does_not_allow_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load_library", FakeBuilds(refused={"-mamx-tile"}))

    found = load_native()

    assert isinstance(found, NativeLibrary)
    assert found.instructions == "avx512_bf16"
    # What was asked for by name is not replaced by something else
    assert load_native("amx") == BuildFailure("the system does not let this process use amx")


@pytest.mark.usefixtures("_xeon")
def test_where_no_build_succeeds_the_reason_is_that_of_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    builds = FakeBuilds(failure="there is no C++ compiler (g++) here")
    monkeypatch.setattr(library, "load_library", builds)
    assert load_native() == BuildFailure("there is no C++ compiler (g++) here")


def test_the_setting_offers_what_there_is_to_choose_from() -> None:
    schema = ExecutorSettings.model_json_schema()["properties"]["cpu_isa"]
    assert tuple(schema["enum"]) == NAMES


def test_library_that_an_image_brings_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a library that was built before, for any machine
    source = tmp_path / "one.cpp"
    source.write_text('extern "C" int one() { return 1; }\n')
    built = build.prebuild(tmp_path / "kernels", "one", (source,), (), ("-O1",))
    # When there is no compiler
    monkeypatch.setattr(build, "_find_compiler", lambda: None)
    assert isinstance(build.load_library("one", (source,), (), ("-O1",)), BuildFailure)
    # Then it is found by its sources and flags
    monkeypatch.setenv(build.PREBUILT_VARIABLE, str(built.parent))
    library = build.load_library("one", (source,), (), ("-O1",))
    assert not isinstance(library, BuildFailure)
    assert library.one() == 1
    source.write_text('extern "C" int one() { return 2; }\n')
    assert isinstance(build.load_library("one", (source,), (), ("-O1",)), BuildFailure)
