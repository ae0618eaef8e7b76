-- Stored responses: their steps besides those of `records.lua`. `store.py` has the map of the keys.

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
