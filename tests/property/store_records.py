"""The records of a pool in Redis, read in one call: records unpacked, lines and sets with their scores."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

from inflight.router.ledger.connection import CommandClient
from inflight.router.ledger.functions import Library, ScriptCalls, compose_library, shared_source
from inflight.router.ledger.keys import NUM_CLASSES, POOL_KEYS, PoolKeys
from tests.support.ledger.store_pool import STEERED_CLOCK

# JSON has no infinity, and cjson writes 14 digits: what is not a small whole number comes as text behind "~".
_READ = """
local function plain(value)
  if type(value) == 'table' then
    local copy = {}
    for key, one in pairs(value) do copy[key] = plain(one) end
    return copy
  elseif type(value) == 'number' and (value ~= math.floor(value) or math.abs(value) >= 1e13) then
    return string.format('~%.17g', value)
  end
  return value
end

local function run()
  local unpacked = {
    state = unpack_state, executors = unpack_executor, tenants = unpack_tenant, requests = unpack_request,
    lengths = cmsgpack.unpack, endings = unpack_ending,
  }
  local found = {}
  for i, name in ipairs(ARGV) do
    local type_of_key, content = redis.call('TYPE', KEYS[i]).ok, {}
    if type_of_key == 'string' then
      content = plain(unpacked[name](redis.call('GET', KEYS[i])))
      content.claims = content.claims ~= '' and cmsgpack.unpack(content.claims) or {}
    elseif type_of_key == 'zset' then
      content = redis.call('ZRANGE', KEYS[i], 0, -1, 'WITHSCORES')
    elseif type_of_key == 'hash' then
      local flat = redis.call('HGETALL', KEYS[i])
      for j = 1, #flat, 2 do
        local record = unpacked[name] and plain(unpacked[name](flat[j + 1])) or flat[j + 1]
        if name == 'requests' then
          record.undecided = record.undecided ~= '' and cmsgpack.unpack(record.undecided) or {}
        elseif name == 'executors' then
          record.pins = record.pins ~= '' and cmsgpack.unpack(record.pins) or {}
        end
        content[flat[j]] = record
      end
    end
    found[name] = content
  end
  return cjson.encode(found)
end
script('read', run, {})
"""

# By a script of the ledger: what functions keep between calls is valid until another script has written.
_WRITE_HISTOGRAM = """
script('write_histogram', function()
  redis.call('HSET', LENGTHS, ARGV[2], cmsgpack.pack(cjson.decode(ARGV[3])))
  return reply.finish({'DONE'})
end, {})
"""


@dataclass(frozen=True, slots=True)
class Records:
    """One moment."""

    content: dict[str, Any]

    def of(self, name: str) -> dict[str, Any]:
        """The records of a hash, or the one of `state`."""
        return self.content[name] or {}

    def scores(self, name: str) -> dict[str, float]:
        """A sorted set, in its order."""
        flat = self.content[name] or []
        return {member: float(score) for member, score in zip(flat[::2], flat[1::2], strict=True)}

    def queue(self) -> list[tuple[int, str, str]]:
        """Who waits: class, tenant and id, in the order within classes and tenants."""
        return [
            (class_, member.partition("\0")[0], member.partition("\0")[2][26:])
            for class_ in range(1, NUM_CLASSES + 1)
            for member in self.scores(f"waiting:{class_}")
        ]


async def read_records(redis: CommandClient, keys: PoolKeys) -> Records:
    """What is there now."""
    text: Any = await ScriptCalls(redis, _test_scripts()).run("read", keys.for_script(()), POOL_KEYS)
    return Records(json.loads(text, object_hook=_with_numbers))


async def write_histogram(redis: CommandClient, keys: PoolKeys, field: str, histogram: dict[str, Any]) -> None:
    """Puts a histogram of output lengths there."""
    args = ("test", field, json.dumps(histogram))
    await ScriptCalls(redis, _test_scripts()).run("write_histogram", keys.for_script(()), args)


@functools.cache
def _test_scripts() -> Library:
    return compose_library(shared_source(STEERED_CLOCK), {"read": _READ, "write_histogram": _WRITE_HISTOGRAM})


def _with_numbers(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _with_numbers(one) for key, one in found.items()}
    if isinstance(found, list):
        return [_with_numbers(one) for one in found]
    return float(found[1:]) if isinstance(found, str) and found.startswith("~") else found
