"""The router process: start, serve, drain, stop.

Exit codes: 0 after a drain, 2 for a setting or model that cannot be used, 3 for an address that cannot be listened on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
from collections.abc import Sequence
from contextlib import suppress

from inflight.common.errors import RequestError
from inflight.common.http.metrics_page import new_registry
from inflight.common.model_source import ModelSource, is_path, load_tokenizer, resolve_model
from inflight.common.process import EXIT_FAILED, run_process
from inflight.common.rpc.server import GrpcServer, Signals, check_listen
from inflight.common.settings import SettingError, describe, load
from inflight.common.telemetry.logs import start_logging
from inflight.router.app import RouterApp, build_router
from inflight.router.dispatch.pools import ModelPools
from inflight.router.ledger.ledgers import NoFunctionsError
from inflight.router.settings import RouterSettings
from inflight.router.text.tokenizer import TextModel
from inflight.router.tools.formats import FormatError, read_formats, with_added
from inflight.router.tools.support import DETECTED, ToolSettings

log = logging.getLogger(__name__)

# While Redis does not answer, its user is checked this often.
REDIS_CHECK_S = 5.0


def main(argv: Sequence[str]) -> int:
    """Runs a router until it gets a signal. Returns the exit code."""
    return run_process(lambda: _run_with_settings(argv))


def _run_with_settings(argv: Sequence[str]) -> int:
    settings = load(RouterSettings, "inflight router", argv)
    start_logging("router", settings.log_level, settings.log_format)
    for line in describe(settings):
        log.info("setting %s", line)
    for listen in (settings.listen, settings.health_listen, settings.http_listen):
        if listen:
            check_listen(listen)
    return asyncio.run(run_router(settings, load_texts(settings)))


def load_texts(settings: RouterSettings) -> dict[str, TextModel]:
    """Loads the tokenizer of every model, by name."""
    texts: dict[str, TextModel] = {}
    tools = tool_settings(settings)
    for entry in settings.model:
        source = _source(entry)
        if source.name in texts:
            raise SettingError(f"model: {source.name} is listed twice; give one of them another name with name=source")
        texts[source.name] = TextModel(
            load_tokenizer(source),
            allow_special_tokens_in_chat=settings.allow_special_tokens_in_chat,
            tools=tools,
        )
        log.info("model %s: %s", source.name, texts[source.name].support)
    return texts


def tool_settings(settings: RouterSettings) -> ToolSettings:
    """Returns the settings about tools, with the table of formats. Raises `SettingError`."""
    path = settings.tool_formats_file
    try:
        formats = with_added(() if path is None else read_formats(path))
    except FormatError as error:
        raise SettingError(f"--tool-formats-file (INFLIGHT_TOOL_FORMATS_FILE): {error}") from None
    chosen = settings.tool_call_format
    if chosen != DETECTED and chosen not in formats:
        known = ", ".join((DETECTED, *formats))
        raise SettingError(f"--tool-call-format (INFLIGHT_TOOL_CALL_FORMAT): is {chosen!r}; must be one of {known}")
    return ToolSettings(formats, chosen, settings.tool_system_prompt)


def _source(entry: str) -> ModelSource:
    name, separator, source = entry.partition("=")
    if not separator or is_path(entry):
        return resolve_model(entry)
    return dataclasses.replace(resolve_model(source), name=name)


async def run_router(settings: RouterSettings, texts: dict[str, TextModel]) -> int:
    """start → serve → drain → stop."""
    router = build_router(settings, texts, new_registry())
    has_checked = await _check_redis_user(router)
    signals = Signals(asyncio.get_running_loop())
    await _listen(router, settings)
    gc.freeze()
    work = asyncio.create_task(_work(router, settings, has_checked=has_checked), name="work")
    readiness = asyncio.create_task(_follow_readiness(router.pools, router.server), name="readiness")

    drain = asyncio.create_task(signals.drain.wait())
    await asyncio.wait((drain, work), return_when=asyncio.FIRST_COMPLETED)

    readiness.cancel()
    await router.server.set_serving(False)
    # After a failure nothing can end normally: clients resume their streams on another router.
    await router.service.drain(settings.drain_timeout_s if drain.done() else 0.0)
    await router.server.stop(grace_s=1.0)  # what is left are watches of health, which never end by themselves
    await router.pools.close()
    drain.cancel()
    work.cancel()
    await asyncio.wait((work,))
    await router.ledgers.aclose()
    if router.http is not None:
        await router.http.stop()
    await router.tracing.aclose()
    if not work.cancelled() and work.exception() is not None:
        log.error("the router failed", exc_info=work.exception())
        return EXIT_FAILED
    log.info("stopped")
    return 0


async def _listen(router: RouterApp, settings: RouterSettings) -> None:
    """Opens the ports that the settings name. Raises `ListenError`."""
    address = await router.server.start(settings.listen)
    if settings.health_listen:
        await router.server.start_health(settings.health_listen)
    if router.http is not None:
        http = await router.http.start(settings.http_listen)
        log.info("metrics on http://%s/metrics%s", http, f"; dashboard on http://{http}/" if settings.board else "")
    log.info("router %s serves %s on %s", router.router_id, ", ".join(sorted(router.pools.by_name)), address)


async def _check_redis_user(router: RouterApp) -> bool:
    """Raises `SettingError` if the router's user in Redis lacks a command, or the server functions. A rarely used
    command would otherwise fail after hours, and leave requests without an end. Returns False if Redis does not
    answer."""
    try:
        lack = await _redis_lack(router)
    except RequestError as error:
        log.warning("the commands of the user in Redis cannot be checked yet: %s", error)
        return False
    if lack:
        await router.ledgers.aclose()
        raise SettingError(f"--redis-url (INFLIGHT_REDIS_URL): {lack}")
    return True


async def _redis_lack(router: RouterApp) -> str:
    """Returns what the server in Redis or the router's user lacks, and what to do; '' if nothing. Raises
    `RequestError` if Redis does not answer."""
    try:
        missing = await router.ledgers.missing_commands()
    except NoFunctionsError:
        return "the server has no functions; use Redis 7, Valkey 7.2 or a newer one"
    if not missing:
        return ""
    loading = "" if "FUNCTION|LOAD" not in missing else ", and how another user loads the scripts"
    return (
        f"the user in Redis may not call {', '.join(missing)} on keys inflight:*; docs/security.md lists the commands "
        f"that a router needs{loading}"
    )


async def _check_redis_user_later(router: RouterApp) -> None:
    """Checks the user as soon as Redis answers. A running router has streams, so it only logs what is missing."""
    while True:
        await asyncio.sleep(REDIS_CHECK_S)
        with suppress(RequestError):
            lack = await _redis_lack(router)
            if lack:
                log.error("%s", lack)
            return


async def _work(router: RouterApp, settings: RouterSettings, *, has_checked: bool) -> None:
    """Runs the background tasks."""
    async with asyncio.TaskGroup() as tasks:
        if not has_checked:
            tasks.create_task(_check_redis_user_later(router), name="user in Redis")
        tasks.create_task(router.pools.run(settings.executors, settings.resolve_interval_s), name="pools")
        tasks.create_task(router.tenants.follow(), name="admission file")
        tasks.create_task(router.authentication.follow(), name="authentication")
        tasks.create_task(router.tokens.run(), name="resume secret")
        tasks.create_task(router.service.warm_up(), name="constraints")
        if router.sampler is not None:
            tasks.create_task(router.sampler.run(), name="board history")
        for files in router.certificates:
            tasks.create_task(files.follow(), name="certificates")


async def _follow_readiness(pools: ModelPools, server: GrpcServer) -> None:
    """Reports ready while some model has an executor. A router without one answers calls with UNAVAILABLE and a retry
    hint."""
    while True:
        await server.set_serving(await pools.readiness_changed())
