-- submit: puts a request in line and seats it in the same call where its turn has come and it fits.
--
-- KEYS        the pool's keys, mailboxes
-- ARGV        [1] caller, who owns the request  [2] request id  [3] tenant  [4] numbers, packed big-endian doubles in
--             the order of calls.py; infinity is no limit and no deadline  [5..] names of ever longer beginnings of
--             the prompt
-- returns     {'PLACED', attempt, executor, generation, blocks} | {'QUEUED', number ahead, estimated wait or ''}
--             | {'REFUSED', reason, limit, milliseconds until a retry makes sense or ''}, the reason one of NO_EXECUTOR,
--             NEVER_FITS, QUEUE_FULL, RATE_LIMITED, DEADLINE_UNMEETABLE | {'DUPLICATE', state} | {'AGAIN'}
-- complexity  O(log N) for N waiting, and that of board where the request may go at once
-- A repeat by the owner with the same arguments changes nothing and returns how the request stands. A request that had
-- an attempt was admitted before: neither rates nor bounds refuse it. Whoever waits already could not be placed when a
-- seat last opened, so boarding is tried only where there is room for this request.
local id, name, limits, pool = ARGV[2], ARGV[3], {}, {}
local class, deadline_in_ms, blocks, sequences, last_attempt, prompt, max, output, block_size, bytes, position
class, deadline_in_ms, blocks, sequences, last_attempt, prompt, max, output, block_size, bytes,
limits.weight, limits.max_running, limits.max_requests, limits.max_tokens, limits.max_bytes,
limits.ms_per_request, limits.request_burst, limits.ms_per_token, limits.token_burst, position
  = struct.unpack('>ddddddddddddddddddd', ARGV[4])
pool.max_requests, pool.max_tokens, pool.max_bytes, pool.max_bypass, pool.age_ms, pool.preempts
  = struct.unpack('>dddddd', ARGV[4], position)

local function duplicate_of(known)
  local same = known.owner == CALLER and known.tenant == name and known.asked_class == class
    and known.deadline_in_ms == deadline_in_ms and known.blocks == blocks and known.sequences == sequences
  if same and known.state ~= 'LOST' then
    return standing(id, known)
  end
  return {'DUPLICATE', known.state}
end

-- Why the request can run nowhere, now or ever.
local function impossible(request)
  local newest = call('ZREVRANGE', REPORTS, 0, 0, 'WITHSCORES')
  if #newest == 0 or NOW - tonumber(newest[2]) > LEASE_MS then
    return {'REFUSED', 'NO_EXECUTOR', '', ''}
  end
  return not fits_somewhere(request) and {'REFUSED', 'NEVER_FITS', '', ''} or nil
end

-- The bound that a request in line exceeds; of the tenant or of the pool.
local function exceeded(tenant)
  local tokens = state.tokens[1] + state.tokens[2] + state.tokens[3]
  return tenant.waiting > limits.max_requests and 'tenant max_queue_requests'
    or tenant.tokens > limits.max_tokens and 'tenant max_queue_tokens'
    or tenant.bytes > limits.max_bytes and 'tenant max_queue_bytes'
    or state.waiting > pool.max_requests and 'max_queue_requests'
    or tokens > pool.max_tokens and 'max_queue_tokens'
    or state.bytes > pool.max_bytes and 'max_queue_bytes'
    or nil
end

-- Why it may not wait: it would come too late, or too much waits already.
local function refusal_of_waiting(request, tenant)
  if last_attempt > 0 or output > 0 then
    return nil
  end
  local limit = exceeded(tenant)
  local wait_ms = estimated_wait(num_ahead(request, num_ahead_in_tenant(id, request)))
  if limit then
    return {'REFUSED', 'QUEUE_FULL', limit, wait_ms and math.max(100, math.min(60000, math.ceil(wait_ms / 4))) or ''}
  end
  local late_ms = (wait_ms or 0) * MARGIN + prefill_ms(request) - deadline_in_ms
  if late_ms > 0 and deadline_in_ms < huge then
    return {'REFUSED', 'DEADLINE_UNMEETABLE', 'first token deadline', math.ceil(math.max(100, math.min(60000, late_ms)))}
  end
  if wait_ms then
    request.estimate, request.correction = wait_ms, state.correction
  end
  return nil
end

-- Forgets a request that was just put in line, and what it took of the rates.
local function take_back(request, tenant, request_ms, token_ms)
  withdraw(id, request)
  call('HDEL', REQUESTS, id)
  tenant.request_ms, tenant.token_ms = request_ms, token_ms
end

register()
local known = load_request(id)
if known then
  return finish(duplicate_of(known))
end
if ended_ms(id) then
  return finish({'DUPLICATE', 'ENDED'})
end

local tenant = load_tenant(name)
tenant.weight, tenant.max_running, tenant.ms_per_token = limits.weight, limits.max_running, limits.ms_per_token
state.max_bypass, state.age_ms, state.preempts = pool.max_bypass, pool.age_ms, pool.preempts == 1
local request_ms, token_ms = tenant.request_ms, tenant.token_ms
local request = {
  owner = CALLER, tenant = name, class = class, asked_class = class, deadline_in_ms = deadline_in_ms,
  deadline_ms = deadline_in_ms < huge and NOW + deadline_in_ms or nil,
  order_ms = NOW + math.min(deadline_in_ms, PATIENCE_MS), since_ms = NOW, arrival = state.arrivals + 1,
  blocks = blocks, sequences = sequences, prompt = prompt, max = max, output = output, block_size = block_size,
  bytes = bytes, attempt = last_attempt, rejections = 0, passed = 0,
}
if #ARGV > 4 then
  request.prefixes = {unpack(ARGV, 5)}
end
if last_attempt == 0 and output == 0 then
  local limit, wait_ms = take_rates(tenant, limits, prompt + max)
  if limit then
    return finish({'REFUSED', 'RATE_LIMITED', limit, wait_ms})
  end
  request.rated = limits.ms_per_token > 0 and prompt + max or nil
end
state.arrivals = request.arrival
save_tenant(name, tenant)

local is_first = state.waiting == 0 and tenant.running < tenant.max_running
local executor_id, reserved = choose(id, request)
if is_first and executor_id and not is_dead(request) then -- then it need not stand in line first: half the work in the usual case
  seat(id, request, executor_id, last_attempt + 1, reserved)
  remember_prefixes(request, executor_id)
  return finish(standing(id, request))
end
local refused = not executor_id and impossible(request)
if refused then
  tenant.request_ms, tenant.token_ms = request_ms, token_ms
  refresh_tenant(name, tenant) -- its limits may be new
  return finish(refused)
end
enqueue(id, request)
if executor_id then
  board()
  request = load_request(id)
end
if request and request.state == 'WAITING' then
  refused = #missing > 0 and {'AGAIN'} or refusal_of_waiting(request, tenant) -- missing: seats could not be given
  if refused then
    take_back(request, tenant, request_ms, token_ms)
    return finish(refused)
  end
  save_request(id, request)
end
return finish(request and standing(id, request) or {'DROPPED'})
