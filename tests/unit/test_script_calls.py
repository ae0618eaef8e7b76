"""How scripts are called, and what happens to libraries."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError, ResponseError

from inflight.local.redis_server import PrivateRedis
from inflight.router.ledger.codec import settle_args, submit_args
from inflight.router.ledger.connection import connect_node
from inflight.router.ledger.functions import NAMES, SOURCES, ScriptCalls, compose_library, load_scripts, shared_source
from inflight.router.ledger.keys import PoolKeys
from inflight.router.ledger.types import Attempt, Demand
from tests.support.ledger.store_pool import PATIENT, STEERED_CLOCK, StorePool

CALLER = ["a"]
FUNCTION_COMMANDS = ("+function|load", "+function|list", "+function|delete")
# Of another version.
ANOTHER_CLOCK = "local function now_ms()\n  return redis.call('TIME')[1] * 1000\nend\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateRedis]:
    """A server that no other test uses."""
    folder = tmp_path_factory.mktemp("functions")
    with PrivateRedis.start(folder / "redis.log") as started:
        yield started


@pytest.fixture
async def admin(server: PrivateRedis) -> AsyncIterator[Redis]:
    """Who may do everything. The server has no library yet."""
    redis = connect_node(server.admin_url, PATIENT)
    await redis.execute_command("FUNCTION", "FLUSH")  # type: ignore[no-untyped-call]
    yield redis
    await redis.aclose()


@pytest.fixture
async def routers(server: PrivateRedis) -> AsyncIterator[Redis]:
    """A router's client."""
    redis = connect_node(server.url, PATIENT)
    yield redis
    await redis.aclose()


@pytest.fixture
def keys(pool: str) -> list[str]:
    """The keys of an unused pool."""
    return PoolKeys(pool).for_script(())


async def libraries(admin: Redis) -> set[str]:
    """The names of the libraries on the server."""
    found = await admin.execute_command("FUNCTION", "LIST")  # type: ignore[no-untyped-call]
    return {dict(zip(one[::2], one[1::2], strict=True))["library_name"] for one in found}


async def test_library_is_loaded_where_it_is_missing(admin: Redis, routers: Redis, keys: list[str]) -> None:
    calls, name = ScriptCalls(routers, load_scripts()), load_scripts().name
    assert (await calls.run("renew", keys, CALLER))[0][0] == "RENEWED"
    assert await libraries(admin) == {name}
    # When it is lost, as after a restart or a failover
    await admin.execute_command("FUNCTION", "FLUSH")  # type: ignore[no-untyped-call]
    assert (await calls.run("renew", keys, CALLER))[0][0] == "RENEWED"
    assert await libraries(admin) == {name}
    # When the data is lost
    await admin.flushall()
    assert (await calls.run("renew", keys, CALLER))[0][:2] == ["RENEWED", ["a"]]


async def test_library_has_room_for_twenty_more_local_variables(admin: Redis) -> None:
    """Lua refuses more than 200 at a time."""
    library = load_scripts()
    spare = "".join(f"local spare_{number}\n" for number in range(20))
    source = library.source.replace("local KEYS", spare + "local KEYS", 1)
    assert await admin.execute_command("FUNCTION", "LOAD", source) == library.name  # type: ignore[no-untyped-call]


async def test_library_that_another_router_has_just_loaded_is_used(routers: Redis, keys: list[str]) -> None:
    """Its FUNCTION LOAD fails then."""

    class Late:
        """Does not find the function before the library is loaded twice."""

        num_refused = 0

        async def execute_command(self, *args: object, keys: Sequence[str]) -> Any:
            if args[0] == "FCALL" and self.num_refused < 2:
                self.num_refused += 1
                raise ResponseError("Function not found")
            return await routers.execute_command(*args)  # type: ignore[no-untyped-call]

    calls = ScriptCalls(Late(), load_scripts())
    assert (await calls.run("renew", keys, CALLER))[0][0] == "RENEWED"


async def test_function_that_is_never_found_is_an_error(keys: list[str]) -> None:
    class Forgetful:
        """Loads libraries, and finds no function."""

        async def execute_command(self, *args: object, keys: Sequence[str]) -> Any:
            if args[0] == "FCALL":
                raise ResponseError("Function not found")
            return []

    with pytest.raises(ResponseError, match="not found"):
        await ScriptCalls(Forgetful(), load_scripts()).run("renew", keys, CALLER)


async def test_library_that_another_user_has_loaded_is_used(admin: Redis, routers: Redis, keys: list[str]) -> None:
    await admin.execute_command("FUNCTION", "LOAD", load_scripts().source)  # type: ignore[no-untyped-call]
    await admin.execute_command("ACL", "SETUSER", "inflight", "-function")  # type: ignore[no-untyped-call]
    try:
        assert (await ScriptCalls(routers, load_scripts()).run("renew", keys, CALLER))[0][0] == "RENEWED"
    finally:
        await admin.execute_command("ACL", "SETUSER", "inflight", *FUNCTION_COMMANDS)  # type: ignore[no-untyped-call]


async def test_user_who_may_not_list_libraries_calls_functions(admin: Redis, routers: Redis, keys: list[str]) -> None:
    calls = ScriptCalls(routers, load_scripts())
    await admin.execute_command("ACL", "SETUSER", "inflight", "-function|list")  # type: ignore[no-untyped-call]
    try:
        assert (await calls.run("renew", keys, CALLER))[0][0] == "RENEWED"
    finally:
        await admin.execute_command("ACL", "SETUSER", "inflight", "+function|list")  # type: ignore[no-untyped-call]


async def test_calls_go_on_when_a_replica_takes_writes_again(admin: Redis, routers: Redis, keys: list[str]) -> None:
    calls = ScriptCalls(routers, load_scripts())
    await admin.execute_command("REPLICAOF", "127.0.0.1", 1)  # type: ignore[no-untyped-call]
    try:
        with pytest.raises(ReadOnlyError):
            await calls.run("renew", keys, CALLER)  # not loaded: FUNCTION LOAD is a write
    finally:
        await admin.execute_command("REPLICAOF", "NO", "ONE")  # type: ignore[no-untyped-call]
    assert (await calls.run("renew", keys, CALLER))[0][0] == "RENEWED"
    await admin.execute_command("REPLICAOF", "127.0.0.1", 1)  # type: ignore[no-untyped-call]
    try:
        with pytest.raises(ReadOnlyError):
            await calls.run("renew", keys, CALLER)
    finally:
        await admin.execute_command("REPLICAOF", "NO", "ONE")  # type: ignore[no-untyped-call]


async def test_routers_of_two_versions_use_their_own_libraries(admin: Redis, routers: Redis, keys: list[str]) -> None:
    older, newer = load_scripts(), load_scripts(ANOTHER_CLOCK)
    calls = [ScriptCalls(routers, scripts) for scripts in (older, newer)]
    for one in (*calls, *calls):
        assert (await one.run("renew", keys, CALLER))[0][0] == "RENEWED"
    assert await libraries(admin) == {older.name, newer.name}


async def test_library_that_no_router_has_used_for_long_is_removed(
    admin: Redis, routers: Redis, keys: list[str]
) -> None:
    # Given a library whose last call was long ago
    await admin.set(keys[0] + ":clock", 1_000_000)
    stopped = load_scripts(STEERED_CLOCK)
    assert (await ScriptCalls(admin, stopped).run("renew", keys, CALLER))[0][0] == "RENEWED"
    # And one that was not called since it was loaded, as after a restart
    unknown = load_scripts(ANOTHER_CLOCK)
    await admin.execute_command("FUNCTION", "LOAD", unknown.source)  # type: ignore[no-untyped-call]
    # When a router loads its own
    current = load_scripts()
    await ScriptCalls(routers, current).run("renew", keys, CALLER)
    assert await libraries(admin) == {current.name, unknown.name}
    # Then one that uses the removed library loads it again
    assert (await ScriptCalls(admin, stopped).run("renew", keys, CALLER))[0][0] == "RENEWED"


async def test_call_that_fails_leaves_nothing_to_the_next(routers: Redis, keys: list[str]) -> None:
    calls = ScriptCalls(routers, load_scripts())
    await calls.run("renew", keys, CALLER)
    before = await calls.run("snapshot", keys, [*CALLER, 10])
    with pytest.raises(RedisError):
        await calls.run("submit", keys, [*CALLER, "", "r", "tenant", "", "", "0", "", "no numbers"])
    with pytest.raises(RedisError):
        await calls.run("report", keys, [*CALLER, "executor"])  # of nothing
    after = await calls.run("snapshot", keys, [*CALLER, 10])
    assert after[:5] == before[:5]


async def test_redis_without_memory_refuses_submits_and_ends_placements(
    admin: Redis, server: PrivateRedis, pool: str
) -> None:
    redis = connect_node(server.url, PATIENT)
    store_pool = StorePool(admin, redis, PoolKeys(pool))
    await store_pool.set_clock(1_000_000)
    router = store_pool.router("a")
    await router.store.report(store_pool.next_report())
    placement = await router.place("first")
    calls, keys = ScriptCalls(redis, load_scripts(STEERED_CLOCK)), PoolKeys(pool).for_script(())
    await admin.config_set("maxmemory", 1)
    try:
        demand = submit_args(Demand("second", 2, 1), PATIENT)
        with pytest.raises(OutOfMemoryError):
            await calls.run("submit", keys, [*CALLER, "", *demand])
        ending = settle_args([Attempt("first", placement.attempt)])
        assert (await calls.run("settle", keys, [*CALLER, *ending]))[0] == ["SETTLED", 1]
    finally:
        await admin.config_set("maxmemory", 0)
    await redis.aclose()


async def test_functions_that_only_read_say_so(admin: Redis, routers: Redis, keys: list[str]) -> None:
    scripts = load_scripts()
    await ScriptCalls(routers, scripts).run("renew", keys, CALLER)
    (found,) = await admin.execute_command("FUNCTION", "LIST")  # type: ignore[no-untyped-call]
    functions = [
        dict(zip(one[::2], one[1::2], strict=True))
        for one in dict(zip(found[::2], found[1::2], strict=True))["functions"]
    ]
    reading = {one["name"] for one in functions if "no-writes" in one["flags"]}
    assert reading == {scripts.function(name) for name in ("explain", "snapshot", "usage", "verify", "idle_ms")}
    assert {one["name"] for one in functions} == {scripts.function(name) for name in (*NAMES, "idle_ms", "forget")}


async def test_every_file_is_lua_by_itself(admin: Redis) -> None:
    files = sorted(SOURCES.rglob("*.lua"))
    assert len(files) > len(NAMES)
    for file in files:
        loaded = await admin.eval("return select(2, loadstring(ARGV[1])) or ''", 0, file.read_bytes())
        assert not loaded, f"{file.name}: {loaded}"


async def test_error_of_a_script_names_the_line_of_its_file(routers: Redis, keys: list[str]) -> None:
    source = "\nscript('broken', function()\n  return load_state.nothing.of_it\nend, {})\n"
    library = compose_library(shared_source(), {"intact": "local unused = 1\n", "broken": source})
    calls = ScriptCalls(routers, library)
    with pytest.raises(ResponseError) as caught:
        await calls.run("broken", keys, CALLER)
    assert library.find_place(str(caught.value)) == "broken.lua:3"
    assert library.find_place("READONLY You can't write against a read only replica.") == ""
