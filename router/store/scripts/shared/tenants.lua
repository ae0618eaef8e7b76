-- Tenants: fair shares by virtual token counters, and rates.
--
-- A tenant's counter is what it was served, in tokens (input 1, output 2) divided by its weight; of those with work in
-- line the smallest goes first. `state.floor` is the counter of whoever was placed last: a tenant that comes back is
-- lifted to it, so that nobody saves up turns by being away (Sheng et al., "Fairness in Serving Large Language Models",
-- with the floor of start-time fair queueing). A tenant is active, in `active:<class>`, while it has work in line there
-- and runs less than it may.
local OUTPUT_WEIGHT = 2

-- Writes where the tenant stands among the active ones of each class; `listed` has what is written there.
local function refresh_tenant(name, tenant)
  local is_active = tenant.waiting > 0 and tenant.running < tenant.max_running
  if is_active and not tenant.active then
    tenant.counter = math.max(tenant.counter, state.floor)
  end
  for class = 1, NUM_CLASSES do
    local counter = is_active and tenant.lines[class] > 0 and tenant.counter
    if counter and counter ~= tenant.listed[class] then
      call('ZADD', ACTIVE[class], counter, name)
    elseif not counter and tenant.listed[class] then
      call('ZREM', ACTIVE[class], name)
    end
    tenant.listed[class] = counter
  end
  tenant.active = is_active
  save_tenant(name, tenant)
end

-- What a request will probably cost its tenant.
local function expected_charge(request, tenant)
  local output = math.max(1, tenant.output_share * request.max - request.output)
  return (request.prompt + OUTPUT_WEIGHT * output) / tenant.weight
end

-- Charges a placement, a request's first time only. The floor follows. Who comes without having stood in line is lifted.
local function charge(request, tenant)
  if request.charge then
    return
  end
  if request.state ~= 'WAITING' and not tenant.active then
    tenant.counter = math.max(tenant.counter, state.floor)
  end
  state.floor = math.max(state.floor, tenant.counter)
  request.charge = expected_charge(request, tenant)
  tenant.counter = tenant.counter + request.charge
end

-- Settles what was charged to what was used.
local function settle_usage(request, tenant, computed, output)
  if request.charge then
    tenant.counter = tenant.counter + (computed + OUTPUT_WEIGHT * output) / tenant.weight - request.charge
  end
  if request.rated then -- unused tokens of its rate
    tenant.token_ms = tenant.token_ms - math.max(0, request.rated - computed - output) * tenant.ms_per_token
  end
  local share = math.min(1, output / math.max(1, request.max))
  tenant.output_share = tenant.output_share + 0.05 * (share - tenant.output_share)
end

-- Rates are kept by GCRA: `…_ms` is when the tenant's bucket is full again. One request of any size may come when it
-- is. Milliseconds to wait, 0 for none.
local function rate_wait(full_ms, cost_ms, burst_ms)
  if cost_ms == 0 or full_ms <= NOW then -- without a limit, or with all that there can be
    return 0
  end
  return math.max(0, math.ceil(full_ms + math.min(cost_ms, burst_ms) - burst_ms - NOW))
end

-- Takes a request of so many tokens from the tenant's rates. The limit that refuses it, and for how long; or nil.
local function take_rates(tenant, limits, tokens)
  local request_wait = rate_wait(tenant.request_ms, limits.ms_per_request, limits.request_burst * limits.ms_per_request)
  if request_wait > 0 then
    return 'tenant requests_per_s', request_wait
  end
  local token_wait = rate_wait(tenant.token_ms, tokens * limits.ms_per_token, limits.token_burst * limits.ms_per_token)
  if token_wait > 0 then
    return 'tenant tokens_per_s', token_wait
  end
  if limits.ms_per_request > 0 then
    tenant.request_ms = math.max(NOW, tenant.request_ms) + limits.ms_per_request
  end
  if limits.ms_per_token > 0 then
    tenant.token_ms = math.max(NOW, tenant.token_ms) + tokens * limits.ms_per_token
  end
  return nil
end
