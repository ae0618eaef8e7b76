-- Estimates: the expected wait of a request, from the speed of the queue, and the quality of the estimates.
--
-- The queue's speed is in tokens (prompt and reserved output) placed per millisecond while requests waited, over about the
-- last MEMORY_MS of such time. What is missing to FULL_MS of it is filled by the speeds that executors report. Raw estimates
-- are multiplied by the tenant's `correction`, the smoothed ratio of actual to estimated: it has what later requests of
-- other tenants overtake. A new tenant begins with that of the pool.
local MEMORY_MS, FULL_MS, LEAST_MS = 10000, 5000, 1000
local MIN_OUTPUTS = 4 -- from which is known how much of its reservation an output uses
local CORRECTION_STEP = 0.05
estimates.MARGIN = 1.2 -- what an estimated wait is multiplied by where it is compared with a deadline

-- Requests that will probably be placed before it: all of higher classes, and those ahead of it in its tenant's queue;
-- the other tenants of its class take turns with it.
function estimates.num_ahead(request, ahead_in_tenant)
  local ahead = ahead_in_tenant
  for class = 1, request.class - 1 do
    ahead = ahead + state.waiting_by_class[class]
  end
  tenants.list_tenants()
  local tenant = load_tenant(request.tenant)
  local others = state.waiting_by_class[request.class] - tenant.waiting_by_class[request.class]
  if others > 0 then
    local num_others = tenants.num_active(request.class) - (tenant.active and 1 or 0)
    ahead = ahead + math.min(others, num_others * (ahead_in_tenant + 1))
  end
  return ahead
end

-- Output tokens, by the share of reservations that the tenant's outputs use.
local function expected_output(request)
  return (reserved_tokens(request) - request.prompt) * load_tenant(request.tenant).output_share
end

-- Tokens per millisecond of a queue of requests like this one, by what executors report; nil if that is unknown. They
-- compute prompts and outputs in the same steps: what takes longer of both decides.
local function reported_speed(request)
  if state.output_speed == 0 or state.num_outputs < MIN_OUTPUTS then
    return nil
  end
  local busy_ms = expected_output(request) / state.output_speed
  if state.prefill_speed > 0 then
    busy_ms = math.max(busy_ms, request.prompt / state.prefill_speed)
  end
  return busy_ms > 0 and reserved_tokens(request) / busy_ms * redis.call('ZCARD', SIZES) or nil
end

-- Tokens per millisecond; nil if nothing was measured.
local function speed(request)
  local missing_ms = math.max(0, FULL_MS - state.moving_ms)
  local reported = missing_ms > 0 and reported_speed(request)
  if reported then
    return (state.moved_tokens + reported * missing_ms) / FULL_MS
  end -- the tokens of requests known only to executors are unknown
  return state.moving_ms >= LEAST_MS and state.moved_tokens > 0 and state.moved_tokens / state.moving_ms or nil
end

-- Milliseconds from one placement to the next; nil if nothing was measured.
local function ms_each(request)
  local tokens_per_ms = state.waiting > 0 and speed(request)
  return tokens_per_ms and (state.tokens[1] + state.tokens[2] + state.tokens[3]) / state.waiting / tokens_per_ms or nil
end

-- Milliseconds until the request is placed, with so many ahead of it; nil if nothing was measured.
function estimates.estimated_wait(request, ahead)
  local ms = ms_each(request)
  return ms and math.ceil((ahead + 1) * ms * load_tenant(request.tenant).correction)
end

-- Milliseconds until a placed request has a seat: executors have placed ones before it.
function estimates.standby_ms(request)
  return state.standby * redis.call('ZCARD', SIZES) * (ms_each(request) or 0)
end

-- Milliseconds from placement to first token; 0 if nothing was measured.
function estimates.prefill_ms(request)
  if state.prefill_speed == 0 then
    return 0
  end
  return (request.prompt + request.output) / state.prefill_speed + state.step_ms
end

-- Milliseconds from first token to last, a step for each; 0 if it is not known how long outputs are.
function estimates.output_ms(request)
  return state.num_outputs < MIN_OUTPUTS and 0 or expected_output(request) * state.step_ms
end

-- Updates the measurements after a waiting request was placed.
function estimates.observe_wait(request)
  if state.moved_at > 0 then
    local kept_share = math.exp((state.moved_at - NOW) / MEMORY_MS)
    state.moving_ms = kept_share * state.moving_ms + (1 - kept_share) * MEMORY_MS
    state.moved_tokens = kept_share * state.moved_tokens + reserved_tokens(request)
  end
  state.moved_at = NOW
  if request.estimate < math.huge and request.attempt == 0 then
    local actual = NOW - request.since_ms
    local weight = math.max(0.01, 1 / (state.num_estimates + 1))
    local ratio = math.max(0.1, math.min(10, (actual + 50) / (request.estimate / request.correction + 50)))
    state.num_estimates = state.num_estimates + 1
    state.error = state.error + weight * (math.abs(actual - request.estimate) / math.max(actual, 100) - state.error)
    state.correction = state.correction + math.max(weight, CORRECTION_STEP) * (ratio - state.correction)
    local tenant = load_tenant(request.tenant)
    tenant.correction = tenant.correction + CORRECTION_STEP * (ratio - tenant.correction)
    save_tenant(request.tenant, tenant)
  end
end

-- The queue is empty: its speed is not measured.
function estimates.stop_measuring()
  state.moved_at = 0
end
