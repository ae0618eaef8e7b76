-- Estimates: the expected wait of a request, from the speed of the queue, and the quality of the estimates.
--
-- The queue's speed is in tokens (prompt and reserved output) placed per millisecond while requests waited, smoothed over
-- windows of a second. Raw estimates are multiplied by `state.correction`, the smoothed ratio of actual to estimated.
local WINDOW_MS = 1000
estimates.MARGIN = 1.2 -- by which an estimate must miss a deadline before the request is refused for it

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

-- Milliseconds until so many requests are placed; nil if nothing was measured.
function estimates.estimated_wait(ahead)
  if state.speed == 0 or state.waiting == 0 then
    return nil
  end
  local tokens = state.tokens[1] + state.tokens[2] + state.tokens[3]
  return math.ceil((ahead + 1) * tokens / state.waiting / state.speed * state.correction)
end

-- Milliseconds from placement to first token; 0 if nothing was measured.
function estimates.prefill_ms(request)
  if state.prefill_speed == 0 then
    return 0
  end
  return (request.prompt + request.output) / state.prefill_speed + state.step_ms
end

-- Updates the measurements after a waiting request was placed.
function estimates.observe_wait(request)
  if state.window_since == 0 then
    state.window_since = NOW
  end
  local window_ms = NOW - state.window_since
  state.window_tokens = state.window_tokens + reserved_tokens(request)
  if window_ms >= WINDOW_MS then
    local speed = state.window_tokens / window_ms
    if speed > 0 then -- the tokens of requests known only to executors are unknown
      state.speed = state.speed > 0 and 0.7 * state.speed + 0.3 * speed or speed
    end
    state.window_since, state.window_tokens = NOW, 0
  end
  if request.estimate < math.huge and request.attempt == 0 then
    local actual = NOW - request.since_ms
    local weight = math.max(0.01, 1 / (state.num_estimates + 1))
    local ratio = math.max(0.1, math.min(10, (actual + 50) / (request.estimate / request.correction + 50)))
    state.num_estimates = state.num_estimates + 1
    state.error = state.error + weight * (math.abs(actual - request.estimate) / math.max(actual, 100) - state.error)
    state.correction = state.correction + math.max(weight, 0.05) * (ratio - state.correction)
  end
end

-- The queue is empty: its speed is not measured.
function estimates.end_window()
  state.window_since, state.window_tokens = 0, 0
end
