-- Records of tenants in stores: the steps that must be atomic, which every store has. `connection.py` composes this file
-- and that of a store into a library of Redis Functions; the module of a store has the map of its keys. Each function is
-- safe to repeat. The clock is Redis' TIME, in milliseconds. Every key of a call shares one hash tag.
--
-- A record (hash) has an id. `index` (zset) has when each of a tenant's expires; the longest unused one is first. `sizes`
-- (hash) has their bytes, and under the empty name their sum. `live` (zset) has those that run. A running record has an
-- owner, and in `running` (zset) the time when its lease lapses. `log` is what belongs to a record besides.

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function add_size(sizes, id, bytes)
  local before = tonumber(redis.call('HGET', sizes, id) or 0)
  local total = tonumber(redis.call('HGET', sizes, '') or 0)
  redis.call('HSET', sizes, id, before + bytes, '', math.max(0, total + bytes))
end

-- Removes a record from its tenant's index. The record and its log are other keys.
local function leave(index, sizes, live, id)
  redis.call('ZREM', index, id)
  redis.call('ZREM', live, id)
  local bytes = tonumber(redis.call('HGET', sizes, id) or 0)
  if bytes > 0 then
    local total = tonumber(redis.call('HGET', sizes, '') or 0)
    redis.call('HSET', sizes, '', math.max(0, total - bytes))
  end
  redis.call('HDEL', sizes, id)
end

local function keep(record, log, index, sizes, live, id, ttl_ms, is_live)
  local expiry = now_ms() + ttl_ms
  redis.call('PEXPIRE', record, ttl_ms)
  redis.call('PEXPIRE', log, ttl_ms)
  redis.call('ZADD', index, expiry, id)
  if is_live then
    redis.call('ZADD', live, expiry, id)
  end
  for _, key in ipairs({index, sizes, live}) do
    -- Not earlier than for a record that is kept longer.
    redis.call('PEXPIRE', key, ttl_ms, 'NX')
    redis.call('PEXPIRE', key, ttl_ms, 'GT')
  end
end

-- Creates a record, and makes room for it: the tenant's expired ones leave its index, then with `evicts` the longest
-- unused ones that do not run, until its limits hold.
-- KEYS: record, log, index, sizes, live, running.
-- ARGV: id, ttl_ms, bytes, max_records, max_bytes, max_running, evicts ('1' or ''), owner ('' if it does not run),
--   lease_ms, then fields and values of the record.
-- Returns {'created' | 'exists' | 'full' | 'busy', ids that left the index …}; their records and logs are the caller's
--   to delete. O(ids that leave).
local MAX_LEAVING = 256

local function create(keys, args)
  local record, log, index, sizes, live, running = unpack(keys)
  local id, ttl_ms, bytes = args[1], tonumber(args[2]), tonumber(args[3])
  local max_records, max_bytes, max_running = tonumber(args[4]), tonumber(args[5]), tonumber(args[6])
  local evicts, owner, lease_ms, now = args[7] == '1', args[8], tonumber(args[9]), now_ms()
  if redis.call('HLEN', record) > 0 then
    return {'exists'}
  end
  redis.call('ZREMRANGEBYSCORE', live, '-inf', now)
  if owner ~= '' and redis.call('ZCARD', live) >= max_running then
    return {'busy'}
  end
  if bytes > max_bytes then
    return {'full'}
  end
  local left = {}
  for _, old in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', now, 'LIMIT', 0, MAX_LEAVING)) do
    leave(index, sizes, live, old)
    table.insert(left, old)
  end
  local function fits()
    local total = tonumber(redis.call('HGET', sizes, '') or 0)
    return redis.call('ZCARD', index) < max_records and total + bytes <= max_bytes
  end
  if evicts and not fits() then
    for _, old in ipairs(redis.call('ZRANGE', index, 0, MAX_LEAVING + max_running)) do
      if not redis.call('ZSCORE', live, old) then
        leave(index, sizes, live, old)
        table.insert(left, old)
        if fits() or #left >= MAX_LEAVING then
          break
        end
      end
    end
  end
  if not fits() then
    return {'full', unpack(left)}
  end
  for number = 10, #args, 2 do
    redis.call('HSET', record, args[number], args[number + 1])
  end
  add_size(sizes, id, bytes)
  keep(record, log, index, sizes, live, id, ttl_ms, owner ~= '')
  if owner ~= '' then
    redis.call('HSET', record, 'owner', owner)
    redis.call('ZADD', running, now + lease_ms, id)
  end
  return {'created', unpack(left)}
end

-- Takes a running record over whose lease has lapsed, or with `cancels` any running one, to cancel it.
-- KEYS: record, running. ARGV: id, owner, lease_ms, '1' to cancel.
-- Returns 'taken', 'held' (its lease has not lapsed), 'ended' or 'gone'. O(log n).
local function take(keys, args)
  local record, running = unpack(keys)
  local id, owner, lease_ms, cancels = args[1], args[2], tonumber(args[3]), args[4] == '1'
  if not redis.call('HGET', record, 'owner') then
    redis.call('ZREM', running, id)
    return redis.call('HLEN', record) > 0 and 'ended' or 'gone'
  end
  local now = now_ms()
  if cancels then
    redis.call('HSET', record, 'cancelled', '1')
  elseif tonumber(redis.call('ZSCORE', running, id) or 0) > now then
    return 'held'
  end
  local times_taken = tonumber(redis.call('HGET', record, 'times_taken') or 0) + 1
  redis.call('HSET', record, 'owner', owner, 'times_taken', times_taken)
  redis.call('ZADD', running, now + lease_ms, id)
  return 'taken'
end

-- Renews the leases of a gateway's running records; with a lease of 0 gives them back.
-- KEYS: running, the record of each. ARGV: lease_ms, then id and owner of each.
-- Returns up to 16 ids of records whose leases have lapsed, then '', then the ids that have another owner or none.
--   O(records of the gateway).
local MAX_LAPSED = 16

local function tend(keys, args)
  local running, now, lost = keys[1], now_ms(), {}
  for number = 2, #keys do
    local id, owner = args[2 * number - 2], args[2 * number - 1]
    if redis.call('HGET', keys[number], 'owner') == owner then
      redis.call('ZADD', running, now + tonumber(args[1]), id)
    else
      table.insert(lost, id)
    end
  end
  local found = redis.call('ZRANGEBYSCORE', running, '-inf', now, 'LIMIT', 0, MAX_LAPSED)
  table.insert(found, '')
  for _, id in ipairs(lost) do
    table.insert(found, id)
  end
  return found
end

-- Deletes a record. KEYS: as for `create`, then where there is one news (a stream of ids that changed). ARGV: id, ttl_ms.
-- Returns 1 if there was one, else 0. O(1).
local function delete(keys, args)
  local record, log, index, sizes, live, running, news = unpack(keys)
  local was_there = redis.call('HLEN', record) > 0
  redis.call('PEXPIRE', record, 0)
  redis.call('PEXPIRE', log, 0)
  leave(index, sizes, live, args[1])
  redis.call('ZREM', running, args[1])
  if was_there and news then
    redis.call('XADD', news, 'MAXLEN', '~', 4096, '*', 'id', args[1])
    redis.call('PEXPIRE', news, tonumber(args[2]))
  end
  return was_there and 1 or 0
end

