-- Stored responses: the steps that must be atomic. `store.py` composes this file into a library of Redis Functions and
-- has the map of the keys. Each function is safe to repeat. The clock is Redis' TIME, in milliseconds. Every key of a
-- call shares one hash tag.

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function add_size(sizes, id, bytes)
  local before = tonumber(redis.call('HGET', sizes, id) or 0)
  local total = tonumber(redis.call('HGET', sizes, '') or 0)
  redis.call('HSET', sizes, id, before + bytes, '', math.max(0, total + bytes))
end

-- Removes a response from its tenant's index. Its record and log are other keys.
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
    redis.call('PEXPIRE', key, ttl_ms)
  end
end

-- Creates a response, and makes room for it: the tenant's expired ones leave its index, then the longest unused ones
-- that have ended, until its limits hold.
-- KEYS: record, log, index, sizes, live, running.
-- ARGV: id, ttl_ms, bytes, max_responses, max_bytes, max_running, owner ('' if it has ended), lease_ms, then fields and
--   values of the record.
-- Returns {'created' | 'exists' | 'full' | 'busy', ids that left the index …}; their records and logs are the caller's
--   to delete. O(ids that leave).
local MAX_LEAVING = 256

local function create(keys, args)
  local record, log, index, sizes, live, running = unpack(keys)
  local id, ttl_ms, bytes = args[1], tonumber(args[2]), tonumber(args[3])
  local max_responses, max_bytes, max_running = tonumber(args[4]), tonumber(args[5]), tonumber(args[6])
  local owner, lease_ms, now = args[7], tonumber(args[8]), now_ms()
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
    return redis.call('ZCARD', index) < max_responses and total + bytes <= max_bytes
  end
  if not fits() then
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
  for number = 9, #args, 2 do
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

-- Appends an entry to the log of a running response, and ends the response if there is an `ended` one.
-- KEYS: record, log, index, sizes, live, running, news.
-- ARGV: id, ttl_ms, owner, entry ('' for none), the ended response ('' while it runs), '1' if the log stays.
-- Returns 'written', 'lost' (another owner has it) or 'gone' (it was cancelled or deleted). O(1).
local function append(keys, args)
  local record, log, index, sizes, live, running, news = unpack(keys)
  local id, ttl_ms, owner, entry, ended, stays = unpack(args)
  local owned_by = redis.call('HGET', record, 'owner')
  if owned_by ~= owner then
    local is_taken = owned_by and redis.call('HGET', record, 'cancelled') ~= '1'
    return is_taken and 'lost' or 'gone'
  end
  if entry ~= '' then
    redis.call('XADD', log, '*', 'entry', entry)
    add_size(sizes, id, #entry)
    redis.call('HSET', record, 'log_bytes', tonumber(redis.call('HGET', record, 'log_bytes') or 0) + #entry)
  end
  if ended ~= '' then
    redis.call('HSET', record, 'response', ended)
    redis.call('HDEL', record, 'owner', 'authorization')
    redis.call('ZREM', live, id)
    redis.call('ZREM', running, id)
    add_size(sizes, id, #ended)
    if stays ~= '1' then
      redis.call('PEXPIRE', log, 0)
      add_size(sizes, id, -tonumber(redis.call('HGET', record, 'log_bytes') or 0))
    end
  end
  keep(record, log, index, sizes, live, id, tonumber(ttl_ms), ended == '')
  redis.call('XADD', news, 'MAXLEN', '~', 4096, '*', 'id', id)
  redis.call('PEXPIRE', news, tonumber(ttl_ms))
  return 'written'
end

-- Takes a running response over whose lease has lapsed, or with `cancels` any running one, to cancel it.
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

-- Renews the leases of a gateway's running responses; with a lease of 0 gives them back.
-- KEYS: running, the record of each. ARGV: lease_ms, then id and owner of each.
-- Returns up to 16 ids of responses whose leases have lapsed, then '', then the ids that have another owner or none.
--   O(responses of the gateway).
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

-- Deletes a response. KEYS: as for `append`. ARGV: id, ttl_ms. Returns 1 if there was one, else 0. O(1).
local function delete(keys, args)
  local record, log, index, sizes, live, running, news = unpack(keys)
  local was_there = redis.call('HLEN', record) > 0
  redis.call('PEXPIRE', record, 0)
  redis.call('PEXPIRE', log, 0)
  leave(index, sizes, live, args[1])
  redis.call('ZREM', running, args[1])
  if was_there then
    redis.call('XADD', news, 'MAXLEN', '~', 4096, '*', 'id', args[1])
    redis.call('PEXPIRE', news, tonumber(args[2]))
  end
  return was_there and 1 or 0
end

-- Counts the life of responses that a new one continues from now. KEYS: index, record of each. ARGV: ttl_ms, id of each.
-- O(ids).
local function touch(keys, args)
  local expiry = now_ms() + tonumber(args[1])
  for number = 2, #keys do
    if redis.call('PEXPIRE', keys[number], args[1]) == 1 then
      redis.call('ZADD', keys[1], 'XX', 'GT', expiry, args[number])
    end
  end
  redis.call('PEXPIRE', keys[1], args[1])
  return 'OK'
end
