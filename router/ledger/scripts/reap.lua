-- reap: removes executors and routers whose lease has lapsed, and sweeps abandoned requests.
--
-- KEYS        the pool's keys, mailboxes
-- ARGV        [1] caller
-- returns     {'DONE', {executor, milliseconds, …}}: who has not reported for OVERDUE_MS or longer, the longest silent
--             first | {'AGAIN'}: there is more to do
-- complexity  O((MAX_PLACEMENTS + MAX_SWEPT + MAX_TOMBSTONES) · log N + T / SWEEP_REAPS) for T tenants, and that of
--             board
-- An executor's reservations are lost, and their owners notified. A router's waiting requests are removed; its placed
-- requests run on, and the audit returns them. Safe to run from every router at any time. Silence counts only while
-- some router was calling: after a gap in the calls (Redis or all routers were down) all leases start again.
local MAX_EXECUTORS, MAX_PLACEMENTS = 1, 32 -- the second for each executor
local MAX_ROUTERS, MAX_SWEPT = 64, 256       -- the second of all requests
local MAX_LOST, MAX_TOMBSTONES = 64, 256
local MIN_TENANTS, SWEEP_REAPS = 64, 600 -- a pass over all tenants takes at most so many calls
local MAX_SIZES = 40 -- of `max_tokens`, in powers of two: more than any context has
local MAX_GAP_MS = 3000
local OVERDUE_MS, MAX_OVERDUE = 1000, 1024
local IDLE_TENANT_MS = 600000 -- a tenant without work for so long is forgotten, with its counter
local LOST_MS = 30000 -- after this time an owner is not expected to act on a lost request

-- Whether routers have called without a gap for as long as a lease.
local function is_attended()
  local last_ms, since_ms = unpack(redis.call('HMGET', ATTENDED, 'last_ms', 'since_ms'))
  if not last_ms or NOW - tonumber(last_ms) > MAX_GAP_MS then
    since_ms = NOW
  end
  redis.call('HSET', ATTENDED, 'last_ms', NOW, 'since_ms', since_ms)
  return NOW - tonumber(since_ms) > LEASE_MS
end

local function reap_executor(id)
  local first, last = states.placements_of(id)
  flush_writes(PLACEMENTS)
  local placements = redis.call('ZRANGEBYLEX', PLACEMENTS, first, last, 'LIMIT', 0, MAX_PLACEMENTS)
  local empty = #placements < MAX_PLACEMENTS
  for _, member in ipairs(placements) do
    local request_id = member:sub(#id + 2):match('^%d+%z(.*)')
    local request = load_request(request_id)
    if not request then
      redis.call('ZREM', PLACEMENTS, member)
    elseif not states.lose(request_id, request) then
      empty = false
    end
  end
  if not empty then
    return false
  end
  local executor = load_executor(id)
  local claimant = executor.claim
  local request = claimant ~= '' and load_request(claimant)
  if request then
    states.unclaim(request)
    save_request(claimant, request)
  end
  if executor.num_adapter_slots > 0 then
    redis.call('HDEL', ADAPTERS, id)
  end
  checkpoints.set_kept(id, '')
  redis.call('HDEL', EXECUTORS, id)
  executors[id], dirty_executors[id] = nil, nil
  for _, key in ipairs({ROOM, SIZES, REPORTS}) do
    redis.call('ZREM', key, id)
  end
  return true
end

-- Scans some of the requests for those that wait and belong to a dead router; `board` drops those that it meets first.
-- A router is forgotten, its entry 0 until then, once all requests were scanned. Returns false if there are more.
local function reap_routers()
  if state.sweep_cursor == '0' then
    local lapsed = redis.call('ZRANGEBYSCORE', ROUTERS, '-inf', NOW - 1, 'LIMIT', 0, MAX_ROUTERS)
    if #lapsed == 0 then
      return true
    end
    for _, name in ipairs(lapsed) do
      redis.call('ZADD', ROUTERS, 0, name)
      kept.living[name], kept.leases[name] = false, nil
    end
  end
  local cursor, found = unpack(redis.call('HSCAN', REQUESTS, state.sweep_cursor, 'COUNT', MAX_SWEPT))
  for i = 1, #found, 2 do
    local status, owner = struct.unpack('<Hc0Hc0', found[i + 1]) -- where a record begins
    local request = status == 'WAITING' and not owners.lives(owner) and load_request(found[i])
    if request then -- not found twice
      states.withdraw(found[i], request)
      delete_request(found[i])
    end
  end
  state.sweep_cursor = cursor
  if cursor ~= '0' then
    return false
  end
  redis.call('ZREMRANGEBYSCORE', ROUTERS, 0, 0)
  return true
end

local function reap_lost()
  local lost = redis.call('ZRANGEBYSCORE', LOST, '-inf', NOW - LOST_MS - 1, 'LIMIT', 0, MAX_LOST)
  for _, id in ipairs(lost) do
    redis.call('ZREM', LOST, id)
    delete_request(id)
  end
  return #lost < MAX_LOST
end

-- Removes the learned output lengths of a tenant; those of all tenants together stay.
local function forget_lengths(name)
  local fields = {}
  for i = 0, MAX_SIZES do
    fields[i + 1] = name .. '\0' .. 2 ^ i
    kept.histograms[fields[i + 1]] = nil
  end
  redis.call('HDEL', LENGTHS, unpack(fields))
end

-- Checks some tenants; the next call continues. The number grows with the number of tenants, so that clients cannot add
-- names faster than they are removed.
local function forget_idle_tenants()
  local count = math.max(MIN_TENANTS, math.ceil(redis.call('HLEN', TENANTS) / SWEEP_REAPS))
  local cursor, found = unpack(redis.call('HSCAN', TENANTS, state.tenant_cursor, 'COUNT', string.format('%d', count)))
  state.tenant_cursor = cursor
  for i = 1, #found, 2 do
    local tenant = load_tenant(found[i])
    local is_idle = tenant.waiting == 0 and tenant.running == 0
    if is_idle and NOW - math.max(tenant.used_ms, tenant.token_ms, tenant.request_ms) > IDLE_TENANT_MS then
      redis.call('HDEL', TENANTS, found[i])
      known_tenants[found[i]] = nil
      if state.overcommits and found[i] ~= '' then -- '' is the tenant of requests found only on executors, and of all lengths
        forget_lengths(found[i])
      end
    end
  end
end

-- Each bounded; returns whether that was all. Routers first: dead ones need no notice about executors.
local function reap_leases()
  local complete = reap_routers()
  local silent = redis.call('ZRANGEBYSCORE', REPORTS, '-inf', NOW - LEASE_MS - 1, 'LIMIT', 0, MAX_EXECUTORS)
  complete = #silent < MAX_EXECUTORS and complete
  for _, id in ipairs(silent) do
    complete = reap_executor(id) and complete
  end
  return complete
end

-- The executors for which another router should relay reports.
local function overdue_reports()
  local found = redis.call('ZRANGEBYSCORE', REPORTS, '-inf', NOW - OVERDUE_MS, 'WITHSCORES', 'LIMIT', 0, MAX_OVERDUE)
  for i = 2, #found, 2 do
    found[i] = NOW - tonumber(found[i])
  end
  return found
end

local function run()
  owners.register()
  states.sweep_tombstones(MAX_TOMBSTONES)
  forget_idle_tenants()
  if is_attended() then
    local all_leases, all_lost = reap_leases(), reap_lost()
    if not (all_leases and all_lost) then
      return reply.finish({'AGAIN'})
    end
  end
  board.run()
  return reply.finish({'DONE', overdue_reports()})
end

script('reap', run, {'allow-oom'})
