-- submit: enqueues requests, and places each in the same call if its turn has come and it fits.
--
-- KEYS        the pool's keys, mailboxes
-- ARGV        [1] caller, who owns the requests  [2] until when the caller waits, or ''  then for each: request id,
--             tenant, numbers, packed little-endian doubles in the order of codec.py, infinity is no limit and no
--             deadline, chain hashes of the prompt's blocks, separated by spaces, digest of the request or '', 1 if its
--             router already serves it, hash of its adapter or ''
-- returns     {'SUBMITTED', {outcome, …}} | {'LATE'}: the caller no longer waits. Of each request: {'PLACED', attempt,
--             executor, generation, blocks, 1 for a suspect, adapter} | {'QUEUED', number ahead, estimated wait or ''}
--             | {'ADOPTED', …}: placed before, and its executor may know it | {'ADOPTED_ENDED', …}: it has
--             ended, there | {'REFUSED', reason, limit, milliseconds until a retry makes sense or ''}, the reason one
--             of NO_EXECUTOR, NEVER_FITS, QUEUE_FULL, RATE_LIMITED, DEADLINE_UNMEETABLE, TAKEN_OVER: another router
--             has taken over the first choice | {'DUPLICATE', state}
--             | {'DROPPED'}: as the event says | {'AGAIN'}: call again for this one. A later request of the call may
--             place one that is QUEUED: then there is an event
-- complexity  O(log N) for each and N waiting, and that of board if it may be placed at once
-- A repeated call by the owner with the same arguments changes nothing and returns the request's state. A repeated call
-- by another router with the same digest makes that router the owner; if the request was cancelled, it starts again.
-- With [7] = 1 neither is done to a request that another living router serves or that was cancelled, and without a
-- digest the id is enough. A request that had an attempt was admitted before: neither rates nor bounds refuse it.
-- A request with several choices is admitted with its first one: that takes the rates of all of them, counts as one
-- request in the rate of requests, and the others must fit in the queue. They come with 0 choices: neither rates nor
-- bounds refuse them.
-- Requests that already wait could not be placed when a seat last opened, so boarding is tried only if there is room
-- for this request, or an earlier call stopped half-way.
local NUM_FIELDS = 7 -- of a request
-- Of the request at hand.
local id, name, prefixes, digest, is_served, adapter
local class, deadline_in_ms, blocks, placement_blocks, sequences, last_attempt, prompt, max, output, block_size, bytes, choices
local weight, max_running, max_requests, max_tokens, max_bytes, ms_per_request, request_burst, ms_per_token, token_burst
local max_pool_requests, max_pool_tokens, max_pool_bytes
local request_ms, token_ms -- of its tenant, before this request
local newest_report -- of all executors

local function read(at)
  local max_bypass, age_ms, preempts, remember_ms, tolerated_ttft_ms
  id, name, prefixes, digest, is_served = ARGV[at], ARGV[at + 1], ARGV[at + 3], ARGV[at + 4], ARGV[at + 5] == '1'
  adapter = ARGV[at + 6]
  class, deadline_in_ms, blocks, placement_blocks, sequences, last_attempt, prompt, max, output, block_size, bytes, choices,
    weight, max_running, max_requests, max_tokens, max_bytes, ms_per_request, request_burst, ms_per_token, token_burst,
    max_pool_requests, max_pool_tokens, max_pool_bytes, max_bypass, age_ms, preempts, remember_ms,
    tolerated_ttft_ms = struct.unpack('<ddddddddddddddddddddddddddddd', ARGV[at + 2])
  return max_bypass, age_ms, preempts == 1, remember_ms, tolerated_ttft_ms
end

-- Whether this is the requested one: by its digest, or by its router, which has no digest of it.
local function is_same(known)
  return known.digest == '?' and (digest ~= '' or is_served)
    or known.digest == digest and (digest ~= '' or is_served) and (known.tenant == name or known.tenant == '')
end

-- Whether the caller repeats a request that it owns.
local function is_own_repeat(known)
  return known.owner == CALLER and (is_same(known) or digest == '' and known.digest == ''
    and known.tenant == name and known.asked_class == class and known.deadline_in_ms == deadline_in_ms
    and known.blocks == blocks and known.sequences == sequences)
end

-- Makes the caller the owner of the request in its current state; one that has just lost its executor is enqueued again
-- first. That is no strike if the caller, its owner, never learned of the placement, and so did not submit it.
local function adopt(known)
  if not reachable(known.owner) then
    return {'AGAIN'}
  end
  local was_told = known.owner ~= CALLER or last_attempt >= known.attempt
  take_over(id, known)
  if known.digest ~= '?' or known.state ~= 'PLACED' then -- otherwise the executor returns the request to the router that attaches
    known.digest = digest
  end
  if known.state ~= 'LOST' then
    known.adopted = known.state == 'PLACED'
    save_request(id, known)
    return standing(id, known)
  end
  withdraw(id, known)
  if was_told then
    strike(known, output > known.output)
  end
  set_placement_blocks(known, placement_blocks)
  requeue(id, known, output)
  return nil
end

-- Handles a request that is known already.
local function repeat_of(known)
  local outcome
  local is_owner_free = not is_served or known.owner == CALLER or not lives(known.owner)
  if is_same(known) and is_owner_free and (known.owner ~= CALLER or known.state == 'LOST') then
    outcome = adopt(known)
  elseif not is_own_repeat(known) or known.state == 'LOST' then
    outcome = {'DUPLICATE', known.state}
  elseif known.state == 'PLACED' or not state.unboarded then
    outcome = standing(id, known)
  end
  if outcome then
    return outcome
  end
  board() -- it was enqueued again, or an earlier call for that stopped half-way
  known = load_request(id)
  if not known then
    return {'DROPPED'}
  end
  return known.state == 'WAITING' and #missing > 0 and {'AGAIN'} or standing(id, known)
end

-- Handles a request that ended recently: returns an outcome, or nil and the attempt after which it starts again.
local function repeat_of_ended()
  local ending = load_ending(id)
  if digest == '' and not is_served or ending and ending.digest ~= digest and ending.digest ~= '?' then
    return {'DUPLICATE', 'ENDED'}
  elseif ending and not ending.cancelled then
    return placed_once(ending)
  elseif is_served then
    return {'DUPLICATE', 'ENDED'}
  end
  return nil, ending and ending.attempt or 0
end

local function is_served_anywhere(adapter)
  for _, executor_id in ipairs(redis.call('ZRANGE', SIZES, '0', MAX_SERVING - 1)) do
    if serves(load_executor(executor_id), adapter) then
      return true
    end
  end
  return false
end

-- Returns why no executor can run the request, now or ever.
local function impossible(request)
  local fitting = kept.fitting and executors[kept.fitting]
  if would_hold(fitting, request) and NOW - fitting.last_report_ms <= LEASE_MS then
    return nil
  end
  newest_report = newest_report or redis.call('ZREVRANGE', REPORTS, '0', '0', 'WITHSCORES')
  if #newest_report == 0 or NOW - tonumber(newest_report[2]) > LEASE_MS then
    return {'REFUSED', 'NO_EXECUTOR', '', ''}
  end
  if fits_somewhere(request) then
    return nil
  elseif request.adapter ~= '' and not is_served_anywhere(request.adapter) then
    return {'REFUSED', 'NO_EXECUTOR', 'adapter', ''} -- its executors may be about to report
  end
  return {'REFUSED', 'NEVER_FITS', '', ''}
end

-- Returns the bound of the tenant or the pool that is exceeded when so many more choices like this one wait.
local function exceeded(request, tenant, more)
  local tokens = more * reserved_tokens(request)
  return tenant.waiting + more > max_requests and 'tenant max_queue_requests'
    or tenant.tokens[1] + tenant.tokens[2] + tenant.tokens[3] + tokens > max_tokens and 'tenant max_queue_tokens'
    or tenant.bytes + more * bytes > max_bytes and 'tenant max_queue_bytes'
    or state.waiting + more > max_pool_requests and 'max_queue_requests'
    or state.tokens[1] + state.tokens[2] + state.tokens[3] + tokens > max_pool_tokens and 'max_queue_tokens'
    or state.bytes + more * bytes > max_pool_bytes and 'max_queue_bytes'
    or nil
end

-- Returns why it may not wait: its deadline would be missed, or the queue is full; nil if it may.
local function refusal_of_waiting(request, tenant, wait_ms)
  if last_attempt > 0 or output > 0 then
    return nil
  end
  local limit = choices > 0 and exceeded(request, tenant, choices - 1)
  if limit then
    return {'REFUSED', 'QUEUE_FULL', limit, wait_ms and math.max(100, math.min(60000, math.ceil(wait_ms / 4))) or ''}
  end
  local late_ms = (wait_ms or 0) * MARGIN + prefill_ms(request) - deadline_in_ms
  if late_ms > 0 and deadline_in_ms < math.huge then
    return {'REFUSED', 'DEADLINE_UNMEETABLE', 'first token deadline', math.ceil(math.max(100, math.min(60000, late_ms)))}
  end
  return nil
end

-- Removes a request that was just enqueued, and returns its rate tokens.
local function take_back(request, tenant)
  withdraw(id, request)
  delete_request(id)
  tenant.request_ms, tenant.token_ms = request_ms, token_ms
end

-- Handles a request that is not placed at once: one known already, or one to enqueue. Returns the outcome.
local function without_seat(known, request, executor_id)
  if known then
    return repeat_of(known)
  end
  local tenant = load_tenant(name)
  local refused = not executor_id and impossible(request)
  if refused then
    tenant.request_ms, tenant.token_ms = request_ms, token_ms
    save_tenant(name, tenant) -- its limits may be new
    return refused
  end
  enqueue(id, request)
  if executor_id or state.unboarded then
    save_request(id, request)
    board()
    request = load_request(id)
  end
  if not request then
    return {'DROPPED'}
  elseif request.state == 'PLACED' then
    return standing(id, request)
  elseif #missing > 0 then -- requests ahead of it could not be placed
    take_back(request, tenant)
    return {'AGAIN'}
  end
  local ahead, wait_ms = outlook(id, request)
  refused = refusal_of_waiting(request, tenant, wait_ms)
  if refused then
    take_back(request, tenant)
    return refused
  end
  request.estimate, request.correction = wait_ms or math.huge, state.correction
  save_request(id, request)
  return {'QUEUED', ahead, wait_ms or ''}
end

-- Handles the request at hand. Returns its outcome.
local function submit(at)
  local max_bypass, age_ms, preempts, remember_ms, tolerated_ttft_ms = read(at)
  if choices == 0 and not is_served and has_lost_first_choice(id) then
    return {'REFUSED', 'TAKEN_OVER', '', ''}
  end
  local known = load_request(id)
  if known then
    return without_seat(known)
  end
  local ended, first_attempt = ended_ms(id), last_attempt + 1
  if ended then
    local outcome, spent = repeat_of_ended()
    if outcome then
      return outcome
    end
    first_attempt = math.max(first_attempt, spent + 1)
  end

  local tenant = load_tenant(name)
  state.max_bypass, state.age_ms, state.preempts = max_bypass, age_ms, preempts
  state.remember_ms, state.tolerated_ttft_ms = remember_ms, tolerated_ttft_ms
  request_ms, token_ms = tenant.request_ms, tenant.token_ms
  local request = new_request(
    CALLER, name, prefixes, digest, class, deadline_in_ms, blocks, placement_blocks, sequences, first_attempt - 1,
    prompt, max, output, block_size, bytes, adapter
  )
  if last_attempt == 0 and output == 0 then
    local limit = choices > 1 and exceeded(request, tenant, choices - 1)
    if limit then
      return {'REFUSED', 'QUEUE_FULL', limit, ''}
    end
    local wait_ms
    if choices > 0 then
      local tokens = choices * reserved_tokens(request)
      limit, wait_ms = take_rates(tenant, ms_per_request, request_burst, ms_per_token, token_burst, tokens)
    end
    if limit then
      return {'REFUSED', 'RATE_LIMITED', limit, wait_ms}
    end
    request.rated = ms_per_token > 0 and reserved_tokens(request) or 0
  end
  tenant.weight, tenant.max_running, tenant.ms_per_token = weight, max_running, ms_per_token
  save_tenant(name, tenant)

  local is_first = state.waiting == 0 and tenant.running < tenant.max_running
  local executor_id, reserved, cached = choose(id, request)
  if is_first and executor_id and not is_dead(request) then -- it need not be enqueued first, which halves the work
    seat(id, request, executor_id, first_attempt, reserved, cached)
    remember_prefixes(request, executor_id)
    if ended then
      forget_end(id)
    end
    return placed(request)
  end
  local outcome = without_seat(nil, request, executor_id)
  if ended and (outcome[1] == 'PLACED' or outcome[1] == 'QUEUED') then
    forget_end(id)
  end
  return outcome
end

if is_late(ARGV[2]) then
  return finish({'LATE'})
end
register()
local outcomes = {}
for at = 3, #ARGV, NUM_FIELDS do
  outcomes[#outcomes + 1] = submit(at)
end
return finish({'SUBMITTED', outcomes})
