-- Tenants: fair shares by virtual token counters, and rates.
--
-- A tenant's counter is its service in tokens (input 1, output 2) divided by its weight; of the tenants with waiting
-- requests the smallest counter goes first. `state.floor` is the counter of the tenant that was placed last: a tenant
-- that returns is lifted to it, so that an idle tenant saves up no service (Sheng et al., "Fairness in Serving Large
-- Language Models", with the floor of start-time fair queueing). A tenant is active, in `active:<class>`, while it has
-- waiting requests in that class and runs less than its limit.
tenants.OUTPUT_WEIGHT = 2
local SHARE_STEP = 0.05 -- of the newest output in how much of its reservation is used; a new tenant is taken for an average one

local function is_active(tenant)
  return tenant.waiting > 0 and tenant.running < tenant.max_running
end

-- `kept.active[class]` has the first active tenants of the class: the counters of those up to `last`, at the counter
-- `bound`, or of all if it is infinite. They are changed here as in Redis, and read again when too few are left.
local NUM_FRONT = 16

local function move_in_front(front, name, counter)
  if front.counters[name] then
    front.num = front.num - 1
  end
  if counter < front.bound or counter == front.bound and counter < math.huge and name <= front.last then
    front.counters[name], front.num = counter, front.num + 1
  else
    front.counters[name] = nil
  end
end

local function read_front(class)
  flush_writes(KEYS[ACTIVE + class])
  local found = redis.call('ZRANGE', KEYS[ACTIVE + class], '0', NUM_FRONT - 1, 'WITHSCORES')
  local front = {counters = {}, num = #found / 2, bound = math.huge}
  for i = 1, #found, 2 do
    front.counters[found[i]] = tonumber(found[i + 1])
  end
  if front.num == NUM_FRONT then
    front.last, front.bound = found[#found - 1], tonumber(found[#found])
  end
  kept.active[class] = front
  return front
end

-- Returns the active tenant that comes next in the class after those in `before`.
function tenants.next_tenant(class, before, num_before)
  local front = kept.active[class]
  if not front or front.num <= num_before and front.bound < math.huge then
    front = read_front(class)
  end
  local first, least = nil, math.huge
  for name, counter in next, front.counters do
    if counter <= least and not before[name] and (counter < least or name < first) then
      first, least = name, counter
    end
  end
  return first
end

-- Sets the positions of the changed tenants among the active ones of each class: before these are read, and at the
-- end. `listed` has what is written there, infinity for nothing. Whole numbers: a sorted set reads and writes those
-- faster.
function tenants.list_tenants()
  for name, tenant in pairs(unlisted_tenants) do
    unlisted_tenants[name] = nil
    local active = is_active(tenant)
    if active and not tenant.active then
      tenant.counter = math.max(tenant.counter, state.floor)
    end
    tenant.active = active
    local waiting, listed, whole, nowhere = tenant.waiting_by_class, tenant.listed, math.floor(tenant.counter), math.huge
    for class = 1, NUM_CLASSES do
      local counter, before = active and waiting[class] > 0 and whole or nowhere, listed[class]
      if counter ~= before then
        if kept.active[class] then
          move_in_front(kept.active[class], name, counter)
        end
        if kept.num_active[class] and (counter == nowhere or before == nowhere) then
          kept.num_active[class] = kept.num_active[class] + (counter < nowhere and 1 or -1)
        end
        if counter < nowhere then
          write_later('ZADD', KEYS[ACTIVE + class], string.format('%d', counter), name)
        else
          write_later('ZREM', KEYS[ACTIVE + class], name)
        end
        listed[class] = counter
      end
    end
  end
end

-- Returns the number of active tenants of the class.
function tenants.num_active(class)
  if not kept.num_active[class] then
    flush_writes(KEYS[ACTIVE + class])
    kept.num_active[class] = redis.call('ZCARD', KEYS[ACTIVE + class])
  end
  return kept.num_active[class]
end

-- Returns the expected cost of a request for its tenant.
local function expected_charge(request, tenant)
  local output = math.max(1, tenant.output_share * (reserved_tokens(request) - request.prompt) - request.output)
  return (request.prompt + tenants.OUTPUT_WEIGHT * output) / tenant.weight
end

-- Charges a request's first placement. The floor follows. A tenant whose request did not wait is lifted here.
function tenants.charge(request, tenant)
  if request.charged then
    return
  end
  if request.state ~= 'WAITING' and not is_active(tenant) then
    tenant.counter = math.max(tenant.counter, state.floor)
  end
  state.floor = math.max(state.floor, tenant.counter)
  request.charged, request.charge = true, expected_charge(request, tenant)
  tenant.counter = tenant.counter + request.charge
end

-- Corrects the charge to what was used.
function tenants.settle_usage(request, tenant, computed, output)
  if request.charged then
    tenant.counter = tenant.counter + (computed + tenants.OUTPUT_WEIGHT * output) / tenant.weight - request.charge
  end
  if request.rated > 0 then -- unused tokens of its rate
    tenant.token_ms = tenant.token_ms - math.max(0, request.rated - computed - output) * tenant.ms_per_token
  end
  local reserved = reserved_tokens(request) - request.prompt
  if reserved > 0 then
    local share = math.min(1, output / reserved)
    tenant.output_share = tenant.output_share + SHARE_STEP * (share - tenant.output_share)
    state.num_outputs = state.num_outputs + 1
    state.output_share = state.output_share + math.max(SHARE_STEP, 1 / state.num_outputs) * (share - state.output_share)
  end
end

-- Returns the rate tokens of a request that was never placed.
function tenants.refund(request)
  if request.rated > 0 and not request.charged then
    local tenant = load_tenant(request.tenant)
    tenant.token_ms = tenant.token_ms - request.rated * tenant.ms_per_token
    save_tenant(request.tenant, tenant)
  end
end

-- Rates follow GCRA: `…_ms` is when the tenant's bucket is full again. A full bucket admits one request of any size.
-- Returns the milliseconds to wait, 0 for none.
local function rate_wait(full_ms, cost_ms, burst_ms)
  if cost_ms == 0 or full_ms <= NOW then -- no limit, or a full bucket
    return 0
  end
  return math.max(0, math.ceil(full_ms + math.min(cost_ms, burst_ms) - burst_ms - NOW))
end

-- Takes a request of so many tokens from the tenant's rates, which are fields of `asked`. Returns nil, or the
-- limit that refuses it and for how long.
function tenants.take_rates(tenant, asked, tokens)
  local request_wait = rate_wait(tenant.request_ms, asked.ms_per_request, asked.request_burst * asked.ms_per_request)
  if request_wait > 0 then
    return 'tenant requests_per_s', request_wait
  end
  local token_wait = rate_wait(tenant.token_ms, tokens * asked.ms_per_token, asked.token_burst * asked.ms_per_token)
  if token_wait > 0 then
    return 'tenant tokens_per_s', token_wait
  end
  if asked.ms_per_request > 0 then
    tenant.request_ms = math.max(NOW, tenant.request_ms) + asked.ms_per_request
  end
  if asked.ms_per_token > 0 then
    tenant.token_ms = math.max(NOW, tenant.token_ms) + tokens * asked.ms_per_token
  end
  return nil
end
