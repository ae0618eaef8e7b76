"""The admission file: what it means, and that whatever is wrong in it is named with its line."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from inflight.common.settings import SettingError
from inflight.router.config.tenants import NO_CONFIG, TenantConfig, TenantConfigFile, Variant, parse_tenants
from inflight.router.config.toml_file import key_line, key_lines
from inflight.router.config.watched_file import ContentError
from inflight.router.ledger.types import NO_LIMITS, TenantLimits

SERVED = frozenset({"smollm-inflight", "smollm-static"})

WHOLE = """\
unknown_tenants = "refuse"

[tenants.default]
max_running = 8

[tenants.acme]           # pays for more
weight = 2
max_queue_requests = 100
max_queue_tokens = 50_000
max_queue_bytes = 1_000_000
requests_per_s = 2.5
tokens_per_s = 1000
token_burst = 4000

[variants.smollm]
"smollm-inflight" = 90
smollm-static = 10
"""


def problems_of(source: str) -> list[str]:
    with pytest.raises(ContentError) as caught:
        parse_tenants(source, SERVED)
    return [str(problem) for problem in caught.value.problems]


def test_whole_file_means_what_it_says() -> None:
    assert parse_tenants(WHOLE, SERVED) == TenantConfig(
        tenants={
            "default": TenantLimits(max_running=8),
            "acme": TenantLimits(
                weight=2,
                max_queue_requests=100,
                max_queue_tokens=50_000,
                max_queue_bytes=1_000_000,
                requests_per_s=2.5,
                request_burst=3,  # what one second brings, where nothing else is said
                tokens_per_s=1000,
                token_burst=4000,
            ),
        },
        refuses_unknown_tenants=True,
        variants={"smollm": (Variant("smollm-inflight", 90), Variant("smollm-static", 10))},
    )


def test_empty_file_limits_no_tenant() -> None:
    assert parse_tenants("", SERVED) == NO_CONFIG
    assert NO_CONFIG.limits_of("any-tenant") == NO_LIMITS


def test_unknown_tenant_has_the_limits_of_the_default_or_is_refused() -> None:
    limits = {"default": TenantLimits(max_running=3), "acme": TenantLimits(weight=2)}
    assert TenantConfig(limits).limits_of("unheard of") == TenantLimits(max_running=3)
    assert TenantConfig(limits).limits_of("acme") == TenantLimits(weight=2)
    assert TenantConfig(limits, refuses_unknown_tenants=True).limits_of("unheard of") is None
    assert TenantConfig(limits, refuses_unknown_tenants=True).limits_of("default") == TenantLimits(max_running=3)
    assert TenantConfig({}, refuses_unknown_tenants=True).limits_of("default") is None


def test_tenant_may_use_the_adapters_of_its_table_or_of_the_default() -> None:
    config = parse_tenants('[tenants.default]\nadapters = []\n[tenants.a]\nadapters = ["x"]\n[tenants.b]', SERVED)
    assert [config.adapters_of(name) for name in ("a", "b", "c")] == [frozenset("x"), None, frozenset()]
    assert NO_CONFIG.adapters_of("a") is None


@pytest.mark.parametrize(
    ("source", "line", "words"),
    [
        ("[tenants.a]\nweight = 0", 2, "a weight of 0 would never be served, use max_running = 0"),
        ("[tenants.a]\n\n# so\nweight = -1", 4, "tenants.a.weight: is -1; must be a number from"),
        ("[tenants.a]\nweight = nan", 2, "is nan"),
        ('[tenants.a]\nweight = "2"', 2, "is '2'; must be a number"),
        ("[tenants.a]\nweight = inf", 2, "is inf"),
        ("[tenants.a]\nweight = 1e7", 2, "must be a number from 1e-06 to 1e+06"),
        ("[tenants.a]\nrequests_per_s = nan", 2, "is nan"),
        ("[tenants.a]\ntokens_per_s = -5", 2, "is -5"),
        ("[tenants.a]\nmax_queue_tokens = 10_000_000_000_000", 2, "from 0 to 1e+12"),
        ("[tenants.a]\ntokens_per_s = 1\ntoken_burst = 0", 3, "is 0; must be a number from 1 to 1e+12"),
        ("[tenants.a]\nmax_running = true", 2, "is True; must be a whole number"),
        ("[tenants.a]\nmax_running = 1.5", 2, "must be a whole number"),
        ("[tenants.a]\nmax_running = -1", 2, "from 0"),
        ("[tenants.a]\nrequests_per_s = 0", 2, "tenants.a.requests_per_s"),
        ("[tenants.a]\ntoken_burst = 5", 2, "has no effect without tokens_per_s"),
        ('[tenants.a]\nadapters = "x"', 2, "tenants.a.adapters"),
        ('[tenants.a]\nadapters = [""]', 2, "tenants.a.adapters"),
        ("[tenants.a]\nwieght = 1", 2, "tenants.a.wieght: is not known; known: weight"),
        ('[tenants.b]\n[tenants."a b"]\nweight = 0', 3, "tenants.a b.weight"),
        ("[tenants]\ndefault = { weight = 0 }", 2, "tenants.default.weight"),
        ("tenants.a.weight = 0", 1, "tenants.a.weight"),
        ("[tenants]\na = 1", 2, "tenants.a: is 1; must be a table"),
        ("tenants = 1", 1, "tenants: is 1; must be a table"),
        ('[tenants."a\\u0007"]', 1, "printable"),
        ('\nunknown_tenants = "maybe"', 2, "is 'maybe'; must be 'default' or 'refuse'"),
        ("\n\n[tenant.a]", 3, "tenant: is not known; known: unknown_tenants, tenants, variants"),
        ("[variants.smollm]\nother = 1", 2, "this router does not serve this model; it serves smollm-inflight, smollm"),
        ("[variants.smollm]\nsmollm-static = 0", 2, "to send no requests to a model, omit it"),
        ("[variants.smollm]", 1, "names no model"),
        ("[variants.smollm-static]\nsmollm-inflight = 1", 1, "is the name of a model that this router serves"),
        ("[tenants.a]\nweight =\nmax_running = 1", 2, "is not TOML"),
        ("[tenants.a]\n[tenants.a]", 2, "is not TOML"),
        ("weight = " + "9" * 5000, 1, "is not TOML"),
        ("weight = " + "[" * 5000, 1, "is not TOML"),
    ],
)
def test_error_names_the_line_and_what_is_allowed(source: str, line: int, words: str) -> None:
    (problem,) = problems_of(source)
    assert problem.startswith(f"line {line}: ")
    assert words in problem


def test_name_with_dots_and_without_quotes_is_told_to_need_them() -> None:
    problems = problems_of("[variants.smollm]\nllama-3.1 = 1")
    assert "line 2: variants.smollm.llama-3: must be a weight; put quotes around a model's name with dots" in problems


def test_everything_that_is_wrong_is_told_in_order() -> None:
    problems = problems_of("[tenants.a]\nweight = 0\n[tenants.b]\nmax_running = -1\n[variants.x]\nnone = 1")
    assert [problem.partition(":")[0] for problem in problems] == ["line 2", "line 4", "line 6"]


def test_key_is_found_however_it_is_written() -> None:
    lines = key_lines("[ a . 'b c' ]\n  d.e = 1\n\"f\" = [\n  1\n]")
    assert lines == {
        ("a",): 1,
        ("a", "b c"): 1,
        ("a", "b c", "d"): 2,
        ("a", "b c", "d", "e"): 2,
        ("a", "b c", "f"): 3,
    }
    assert key_line(lines, ("a", "b c", "f", "inner")) == 3
    assert key_line(lines, ("a", "other")) == 1
    assert key_line(lines, ("z",)) is None


class TestFile:
    def test_no_file_means_no_rules(self) -> None:
        assert TenantConfigFile.open(None, SERVED).config == NO_CONFIG

    def test_wrong_file_at_start_names_setting_file_and_line(self, tmp_path: Path) -> None:
        path = tmp_path / "admission.toml"
        path.write_text("[tenants.a]\nweight = 0")
        with pytest.raises(SettingError, match=rf"--admission-file .*{path}, line 2: tenants\.a\.weight: is 0"):
            TenantConfigFile.open(path, SERVED)

    def test_missing_file_and_one_that_is_no_text_are_setting_errors(self, tmp_path: Path) -> None:
        with pytest.raises(SettingError, match="cannot read"):
            TenantConfigFile.open(tmp_path / "nowhere.toml", SERVED)
        (tmp_path / "binary").write_bytes(b"\xff")
        with pytest.raises(SettingError, match="not UTF-8"):
            TenantConfigFile.open(tmp_path / "binary", SERVED)

    def test_change_is_in_force_after_the_next_look(self, tmp_path: Path) -> None:
        path = tmp_path / "admission.toml"
        path.write_text("[tenants.a]\nweight = 1")
        file = TenantConfigFile.open(path, SERVED)
        path.write_text("[tenants.a]\nweight = 2.5")
        file.look()
        assert file.config.limits_of("a") == TenantLimits(weight=2.5)

    def test_file_put_in_its_place_is_read(self, tmp_path: Path) -> None:
        path, other = tmp_path / "admission.toml", tmp_path / "new.toml"
        path.write_text("[tenants.a]\nweight = 1")
        file = TenantConfigFile.open(path, SERVED)
        other.write_text("[tenants.a]\nweight = 2")
        other.replace(path)
        file.look()
        assert file.config.limits_of("a") == TenantLimits(weight=2)

    def test_wrong_change_keeps_the_old_rules_and_says_so_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = tmp_path / "admission.toml"
        path.write_text("[tenants.a]\nweight = 2")
        file = TenantConfigFile.open(path, SERVED)
        path.write_text("[tenants.a]\nmax_running = 1\nweight = -200")
        with caplog.at_level(logging.ERROR):
            file.look()
            file.look()
        assert file.config.limits_of("a") == TenantLimits(weight=2)
        assert [f"{path}, line 3: tenants.a.weight: is -200" in text for text in caplog.messages] == [True]

    def test_removed_file_keeps_the_old_rules(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = tmp_path / "admission.toml"
        path.write_text("[tenants.a]\nweight = 2")
        file = TenantConfigFile.open(path, SERVED)
        path.unlink()
        with caplog.at_level(logging.ERROR):
            file.look()
            file.look()
        assert file.config.limits_of("a") == TenantLimits(weight=2)
        assert len(caplog.messages) == 1

    def test_file_that_cannot_be_read_for_a_while_keeps_the_old_rules(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = tmp_path / "admission.toml"
        path.write_text("[tenants.a]\nweight = 2")
        file = TenantConfigFile.open(path, SERVED)
        path.unlink()
        path.mkdir()
        with caplog.at_level(logging.ERROR):
            file.look()
            file.look()
        assert file.config.limits_of("a") == TenantLimits(weight=2)
        assert [f"cannot read {str(path)!r}: Is a directory" in text for text in caplog.messages] == [True]

        path.rmdir()
        path.write_text("[tenants.a]\nweight = 3")
        file.look()
        assert file.config.limits_of("a") == TenantLimits(weight=3)
