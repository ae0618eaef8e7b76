-- explain: reports the state of a request and what it waits for.
--
-- KEYS        the pool's keys
-- ARGV        [1] caller  [2] request id
-- returns     {state, attempt, class, tenant, executor or '', number ahead, estimated wait or '', what it waits for or
--             '', blocks needed, most blocks available, times bypassed, the executor that holds its longest prefix or '',
--             milliseconds of prompts in front of it there, milliseconds that it may wait there} | {'ENDED'}
--             | {'UNKNOWN'}
-- complexity  O(log N)
-- Changes nothing.
local MAX_SILENT = 32

-- As `roomiest`, but leaves silent executors in `room`.
local function with_room(count)
  local found = {}
  for _, executor_id in ipairs(redis.call('ZRANGE', ROOM, 0, count + MAX_SILENT - 1)) do
    if #found < count and places.takes_work(load_executor(executor_id)) then
      found[#found + 1] = executor_id
    end
  end
  return found
end

local function most_available()
  local first = with_room(1)[1]
  return first and math.max(0, available_blocks(load_executor(first))) or 0
end

-- The tenant of the class that is served next.
local function first_tenant(class)
  return redis.call('ZRANGE', KEYS[ACTIVE + class], 0, 0)[1]
end

-- Whether some executor has a seat that the request may take. A suspect may not run beside another suspect.
local function may_find_blocks(request)
  for _, executor_id in ipairs(with_room(request.failures > 0 and places.MAX_SUSPECT_CANDIDATES or 1)) do
    if suspects.allows(request, load_executor(executor_id)) then
      return true
    end
  end
  return false
end

-- Whether only its adapter keeps the request from an executor.
local function waits_for_slot(request)
  for _, executor_id in ipairs(request.adapter ~= '' and with_room(places.MAX_ADAPTER_CANDIDATES) or {}) do
    local executor = load_executor(executor_id)
    if places.room_for(request, executor, adapters) and not places.room_for(request, executor) then
      return true
    end
  end
  return false
end

-- Returns who holds its longest prefix, the milliseconds of prompts in front of it there, and how many it would wait: as
-- long as on the executor with most available blocks and as the prefix saves, less the fuller the holder is than that one.
local function prefix_holder(request)
  local names = prefix.split_prefixes(request.prefixes)
  local found = #names > 0 and prefix.load_holders(request) or {}
  for i = #names, 1, -1 do
    for id, length, due_ms in (found[i] or ''):gmatch(prefix.HOLDER) do
      local executor, cached = load_executor(id), prefix.usable_tokens(request, names, i, id, length, due_ms)
      if executor and cached then
        local best = load_executor(with_room(1)[1] or id)
        local wait_ms, tolerated_ms, speed = prefix.prefill_wait(executor), prefix.tolerated_wait(request, best), executor.prefill_speed
        local fuller = fullness.of(executor) - fullness.of(best)
        local price = fullness.WEIGHT * fuller * (request.prompt + request.output)
        local saved = math.max(0, cached - price)
        local cheaper_ms = speed > 0 and prefix.prefill_wait(best) + saved / speed or wait_ms
        return id, math.ceil(wait_ms), math.floor(math.min(tolerated_ms, cheaper_ms))
      end
    end
  end
  return '', 0, 0
end

local function wait_reason(request, ahead_in_tenant)
  tenants.list_tenants()
  local newest = redis.call('ZREVRANGE', REPORTS, 0, 0, 'WITHSCORES')
  if #newest == 0 or NOW - tonumber(newest[2]) > SILENT_MS then
    return 'EXECUTOR'
  end
  local tenant = load_tenant(request.tenant)
  if not tenant.active then
    return 'TENANT_LIMIT'
  end
  for class = 1, request.class - 1 do
    if first_tenant(class) then
      return 'CLASS'
    end
  end
  if ahead_in_tenant > 0 then
    return 'ORDER'
  end
  if first_tenant(request.class) ~= request.tenant then
    return 'FAIRNESS'
  end
  if #claims > 0 and request.claim == '' and #with_room(1) == 0 then
    return 'HELD_LINE'
  end
  if waits_for_slot(request) then
    return 'ADAPTER'
  end
  return may_find_blocks(request) and 'BLOCKS' or 'SEAT'
end

local function run()
  local id = ARGV[2]
  local request = load_request(id)
  if not request then
    local ended = redis.call('ZSCORE', ENDED, id)
    return reply.answer({ended and NOW - tonumber(ended) <= state.remember_ms and 'ENDED' or 'UNKNOWN'})
  end
  local reason, ahead, wait_ms, holder, prefill_ms, tolerated_ms = '', 0, '', '', 0, 0
  if request.state == 'WAITING' then
    local ahead_in_tenant = states.num_ahead_in_tenant(id, request)
    ahead = estimates.num_ahead(request, ahead_in_tenant)
    wait_ms, reason = estimates.estimated_wait(request, ahead) or '', wait_reason(request, ahead_in_tenant)
    holder, prefill_ms, tolerated_ms = prefix_holder(request)
  end
  local best = with_room(1)[1]
  return reply.answer({
    request.state, request.attempt, request.class, request.tenant,
    request.state == 'PLACED' and request.executor_id or '', ahead, wait_ms, reason,
    request.state == 'PLACED' and request.reserved or lengths.needed_blocks(request, best and load_executor(best)),
    most_available(), request.passed, holder, prefill_ms, tolerated_ms,
  })
end

script('explain', run, {'no-writes'})
