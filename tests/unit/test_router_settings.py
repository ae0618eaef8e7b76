"""The effects of the router's settings."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from pydantic import SecretStr
from redis import Redis

from inflight.common.settings import SettingError, describe, load
from inflight.local.redis_server import USER, PrivateRedis
from inflight.router.app import ledger_settings_of, resume_tokens
from inflight.router.auth.resume_token import ResumeTokens
from inflight.router.ledger.ledgers import Ledgers, NoFunctionsError
from inflight.router.ledger.settings import LedgerSettings
from inflight.router.main import load_texts, run_router
from inflight.router.settings import RouterSettings
from tests.support.text.text_models import llama_like


def test_defaults_are_those_of_the_store() -> None:
    assert ledger_settings_of(RouterSettings()) == LedgerSettings()


def test_admission_settings_reach_the_store() -> None:
    flags = ["--max-queue-tokens", "5", "--max-queue-bytes", "6", "--max-bypass", "0", "--age-s", "1.5"]
    settings = load(RouterSettings, "inflight router", [*flags, "--preempt-for-priority"])
    assert ledger_settings_of(settings) == LedgerSettings(
        max_queue_tokens=5, max_queue_bytes=6, max_bypass=0, age_ms=1500, preempt_for_priority=True
    )


@pytest.mark.parametrize(
    "flags",
    [
        ["--max-queue-tokens", "0"],
        ["--max-bypass", "-1"],
        ["--age-s", "0"],
        ["--queue-event-interval-s", "0"],
        ["--max-prompt-bytes", "ten"],
        ["--executors", "nowhere"],
    ],
)
def test_value_out_of_range_is_refused_by_name(flags: list[str]) -> None:
    with pytest.raises(SettingError, match=flags[0]):
        load(RouterSettings, "inflight router", flags)


def test_resume_secret_that_could_be_guessed_is_refused_and_never_shown() -> None:
    with pytest.raises(SettingError, match=r"--resume-secret.*at least 32 characters") as caught:
        load(RouterSettings, "inflight router", ["--resume-secret", "hunter2"])
    assert "hunter2" not in str(caught.value)
    secret = "r4nd0m" * 6
    settings = load(RouterSettings, "inflight router", ["--resume-secret", secret])
    assert resume_tokens(settings, _never).make("acme", "m", "r") == ResumeTokens(secret.encode()).make(
        "acme", "m", "r"
    )
    assert secret not in "\n".join(describe(settings))


async def _never(own: bytes | None) -> bytes:
    raise AssertionError("a secret that is set is not asked for")


async def test_router_does_not_start_with_an_admission_file_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "admission.toml"
    path.write_text("[tenants.a]\nmax_running = -1")
    with pytest.raises(SettingError, match="line 2"):
        await run_router(RouterSettings(admission_file=path), {})


@pytest.mark.parametrize("name", ["a,b", "a=b", "a, b=c,d"])
def test_models_whose_paths_have_commas_or_equals_signs_are_served(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (name, "plain"):
        llama_like().save_pretrained(folder)
        (tmp_path / folder / "config.json").write_text('{"model_type": "llama"}')

    def served(model: str) -> list[str]:
        return [*load_texts(load(RouterSettings, "inflight router", ["--model", model]))]

    assert served(f"./{name}") == served(str(tmp_path / name)) == [name]
    assert served(f"mine=./{name}") == ["mine"]
    assert served(f"./plain, ./{name},other=./plain") == ["plain", name, "other"]
    assert served("one=./plain,two=./plain") == ["one", "two"]


async def test_router_that_may_not_load_its_scripts_says_where_the_way_out_is_described(tmp_path: Path) -> None:
    with PrivateRedis.start(tmp_path / "redis.log") as server, Redis.from_url(server.admin_url) as admin:
        admin.execute_command("ACL", "SETUSER", USER, "-function|load")
        what = r"may not call FUNCTION\|LOAD .* docs/security.md lists .*, and how another user loads the scripts"
        with pytest.raises(SettingError, match=what):
            await run_router(RouterSettings(redis_url=SecretStr(server.url)), {})


async def test_router_does_not_start_on_a_server_without_functions(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ledgers, "missing_commands", AsyncMock(side_effect=NoFunctionsError))
    with pytest.raises(SettingError, match="no functions; use Redis 7"):
        await run_router(RouterSettings(redis_url=SecretStr(redis_url)), {})


async def test_router_does_not_start_if_its_user_in_redis_lacks_a_command(tmp_path: Path) -> None:
    with PrivateRedis.start(tmp_path / "redis.log") as server, Redis.from_url(server.admin_url) as admin:
        admin.execute_command("ACL", "SETUSER", USER, "-zlexcount", "-hscan")
        with pytest.raises(SettingError, match="may not call HSCAN, ZLEXCOUNT on keys"):
            await run_router(RouterSettings(redis_url=SecretStr(server.url)), {})
