-- Files and batches: their steps besides those of `records.lua`. `batches.py` has the map of the keys.

-- Writes what a gateway has done of a running batch: fields of its record, and a segment of results.
-- KEYS: record, segments, index, sizes, live, running. ARGV: id, ttl_ms, owner, segment ('' for none), its description,
--   how many segments the owner knows besides, '1' if the batch has ended, then fields and values of the record.
-- Returns 'written' or 'lost': the batch has another owner or none; or it has a segment that this owner wrote in a call
--   that it took for failed, and whose lines it may have run again. O(fields).
local function advance(keys, args)
  local record, segments, index, sizes, live, running = unpack(keys)
  local id, ttl_ms, owner, segment, description = args[1], tonumber(args[2]), args[3], args[4], args[5]
  local has_ended = args[7] == '1'
  if redis.call('HGET', record, 'owner') ~= owner then
    return 'lost'
  end
  local is_repeated = segment == '' or redis.call('HGET', segments, segment)
  if not is_repeated and redis.call('HLEN', segments) ~= tonumber(args[6]) then
    return 'lost'
  end
  for number = 8, #args, 2 do
    redis.call('HSET', record, args[number], args[number + 1])
  end
  if segment ~= '' then
    redis.call('HSET', segments, segment, description)
    -- It makes progress, so its takeovers until now are no sign of a defect.
    redis.call('HDEL', record, 'times_taken')
  end
  if has_ended then
    redis.call('HDEL', record, 'owner', 'authorization')
    redis.call('ZREM', live, id)
    redis.call('ZREM', running, id)
    redis.call('PEXPIRE', segments, 0)
  end
  keep(record, segments, index, sizes, live, id, ttl_ms, not has_ended)
  return 'written'
end

-- Returns fields of records. KEYS: the records. ARGV: the fields. Returns a list of values for each. O(keys * fields).
local function load(keys, args)
  local found = {}
  for _, key in ipairs(keys) do
    table.insert(found, redis.call('HMGET', key, unpack(args)))
  end
  return found
end
