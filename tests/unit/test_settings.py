"""Reading of a process's settings, and the errors of invalid ones."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator

from inflight.common.settings import ProcessSettings, SettingError, describe, load


class Policy(Enum):
    """A choice given as an enumeration."""

    EAGER = "eager"
    LAZY = "lazy"


class BusSettings(ProcessSettings):
    """Drives a bus."""

    num_seats: int = Field(32, ge=1, le=256, description="Seats of the bus.")
    load_fraction: float | None = Field(None, gt=0, le=1, description="Share of the load, 100% at most.")
    batching: Literal["inflight", "static"] = Field("inflight", description="When passengers board.")
    policy: Policy = Field(Policy.EAGER, description="How keen the driver is.")
    num_wheels: int = Field(4, ge=4, multiple_of=2, description="Wheels of the bus.")
    enable_radio: bool = Field(True, description="Whether there is music.")
    stops: tuple[str, ...] = Field((), description="Where it stops.")
    log_path: Path | None = Field(None, description="Where to write.")
    password: SecretStr | None = Field(None, description="Opens the depot.")

    @field_validator("stops")
    @classmethod
    def _no_paris(cls, stops: tuple[str, ...]) -> tuple[str, ...]:
        if "paris" in stops:
            raise ValueError("the bus does not go there")
        return stops

    @model_validator(mode="after")
    def _quiet_when_full(self) -> BusSettings:
        if self.enable_radio and self.num_seats == 256:
            raise ValueError("enable_radio needs num_seats below 256")
        return self


class DepotSettings(ProcessSettings):
    """Keeps buses."""

    place: str = Field(description="Where it is.")
    lines: tuple[Literal["north", "south"], ...] = Field(("north",), min_length=1, description="Which it serves.")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:

    for name in list(os.environ):
        if name.upper().startswith("INFLIGHT_"):
            monkeypatch.delenv(name)


def load_bus(*argv: str) -> BusSettings:
    return load(BusSettings, "bus", argv)


def error_of(*argv: str) -> str:
    with pytest.raises(SettingError) as caught:
        load_bus(*argv)
    return str(caught.value)


def test_defaults_stand_when_nothing_is_given() -> None:
    assert load_bus() == BusSettings()


def test_flag_wins_over_environment_over_file_over_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "bus.toml"
    file.write_text('num_seats = 1\nbatching = "static"\nload_fraction = 0.25\nenable_radio = false\n')
    monkeypatch.setenv("INFLIGHT_CONFIG", str(file))
    monkeypatch.setenv("INFLIGHT_NUM_SEATS", "2")
    monkeypatch.setenv("INFLIGHT_LOAD_FRACTION", "0.5")

    settings = load_bus("--num-seats", "3")

    assert (settings.num_seats, settings.load_fraction, settings.batching) == (3, 0.5, "static")
    assert settings.enable_radio is False
    assert settings.policy is Policy.EAGER


def test_config_flag_wins_over_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("num_seats = 5")
    monkeypatch.setenv("INFLIGHT_CONFIG", str(tmp_path / "missing.toml"))
    assert load_bus("--config", str(tmp_path / "a.toml")).num_seats == 5


@pytest.mark.parametrize(
    ("argv", "expected"), [((), True), (("--no-enable-radio",), False), (("--enable-radio",), True)]
)
def test_switch_has_a_flag_for_each_side(argv: tuple[str, ...], expected: bool) -> None:
    assert load_bus(*argv).enable_radio is expected


def test_list_is_split_at_commas_in_flag_and_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_bus("--stops", "dns:///a:1, b:2").stops == ("dns:///a:1", "b:2")
    monkeypatch.setenv("INFLIGHT_STOPS", "c:3,d:4")
    assert load_bus().stops == ("c:3", "d:4")


def test_list_in_the_file_is_a_list(tmp_path: Path) -> None:
    (tmp_path / "bus.toml").write_text('stops = ["a", "b"]')
    assert load_bus("--config", str(tmp_path / "bus.toml")).stops == ("a", "b")


def test_variable_of_another_process_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_KV_CACHE_FREE_GPU_MEM_FRACTION", "0.9")
    assert load_bus() == BusSettings()


def test_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_NUM_SEATS", "")
    assert load_bus().num_seats == 32


@pytest.mark.parametrize(
    ("argv", "flag", "value", "allowed"),
    [
        (("--num-seats", "0"), "--num-seats (INFLIGHT_NUM_SEATS)", "'0'", "a whole number ≥ 1 and ≤ 256"),
        (("--num-seats", "many"), "--num-seats (INFLIGHT_NUM_SEATS)", "'many'", "a whole number ≥ 1 and ≤ 256"),
        (("--num-wheels", "5"), "--num-wheels (INFLIGHT_NUM_WHEELS)", "'5'", "a whole number ≥ 4 and a multiple of 2"),
        (("--load-fraction", "nan"), "--load-fraction (INFLIGHT_LOAD_FRACTION)", "'nan'", "a number > 0 and ≤ 1"),
        (("--batching", "dynamic"), "--batching (INFLIGHT_BATCHING)", "'dynamic'", "one of inflight, static"),
        (("--policy", "wild"), "--policy (INFLIGHT_POLICY)", "'wild'", "one of eager, lazy"),
    ],
)
def test_error_names_flag_variable_value_and_what_is_allowed(
    argv: tuple[str, ...], flag: str, value: str, allowed: str
) -> None:
    assert error_of(*argv) == f"{flag}: {value} is not allowed; allowed: {allowed}"


@pytest.mark.parametrize(("value", "shown"), [("", "an empty list"), ("north,east", "'east'")])
def test_error_of_a_list_names_its_elements_and_that_it_is_not_empty(value: str, shown: str) -> None:
    text = f"--lines (INFLIGHT_LINES): {shown} is not allowed; allowed: a list a,b,… of north, south, not empty"
    with pytest.raises(SettingError) as caught:
        load(DepotSettings, "inflight depot", ["--place", "x", "--lines", value])
    assert str(caught.value) == text


def test_bad_variable_is_named_like_a_bad_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_ENABLE_RADIO", "perhaps")
    assert error_of() == ("--enable-radio (INFLIGHT_ENABLE_RADIO): 'perhaps' is not allowed; allowed: true or false")


def test_every_wrong_setting_is_named_at_once() -> None:
    text = error_of("--num-seats", "0", "--batching", "no")
    assert "--num-seats" in text
    assert "--batching" in text


def test_rule_of_a_class_gives_its_own_reason() -> None:
    assert error_of("--stops", "paris").endswith("the bus does not go there")
    assert error_of("--num-seats", "256") == "enable_radio needs num_seats below 256"


def test_required_setting_that_is_missing_is_named() -> None:
    with pytest.raises(SettingError, match=r"--place \(INFLIGHT_PLACE\): required"):
        load(DepotSettings, "depot", [])


def test_unknown_flag_is_refused_with_the_nearest_one() -> None:
    assert error_of("--num-seat=4") == "unknown argument '--num-seat=4'; did you mean '--num-seats'?"
    assert error_of("stray") == "unknown argument 'stray'"


def test_flag_without_its_value_is_refused() -> None:
    assert "--num-seats" in error_of("--num-seats")


def test_unknown_key_in_the_file_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "bus.toml").write_text("num_seat = 4")
    text = error_of("--config", str(tmp_path / "bus.toml"))
    assert "unknown setting 'num_seat'" in text
    assert "did you mean 'num_seats'?" in text


@pytest.mark.parametrize(("content", "reason"), [(None, "cannot read"), ("num_seats =", "is not TOML")])
def test_unreadable_file_is_an_error_that_names_it(tmp_path: Path, content: str | None, reason: str) -> None:
    file = tmp_path / "bus.toml"
    if content is not None:
        file.write_text(content)
    text = error_of("--config", str(file))
    assert text.startswith("--config (INFLIGHT_CONFIG): ")
    assert reason in text
    assert "bus.toml" in text


def test_help_shows_every_setting_with_default_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_bus("--help")
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name in BusSettings.model_fields:
        assert f"--{name.replace('_', '-')}" in shown
        assert f"INFLIGHT_{name.upper()}" in shown
    assert "a whole number ≥ 1 and ≤ 256; default 32" in shown
    assert "100% at most" in shown
    assert "Drives a bus." in shown


def test_description_holds_only_what_was_changed() -> None:
    assert describe(BusSettings()) == []
    assert describe(BusSettings(num_seats=8, policy=Policy.LAZY, stops=("a", "b"))) == [
        "num_seats = 8 (default 32)",
        "policy = lazy (default eager)",
        "stops = a,b (default empty)",
    ]


def test_secret_is_shown_nowhere() -> None:
    settings = load_bus("--password", "hunter2")
    assert settings.password is not None
    assert settings.password.get_secret_value() == "hunter2"
    assert "hunter2" not in repr(settings) + "".join(describe(settings))


def test_settings_cannot_be_changed() -> None:
    settings: Any = BusSettings()
    with pytest.raises(ValidationError):
        settings.num_seats = 1


def test_direct_construction_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_NUM_SEATS", "7")
    assert BusSettings().num_seats == 32
