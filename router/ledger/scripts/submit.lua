-- submit: enqueues requests, and places each in the same call if its turn has come and it fits.
--
-- KEYS        the pool's keys, mailboxes
-- ARGV        [1] caller, who owns the requests  [2] until when the caller waits, or ''  then for each the fields of SUBMIT
--             (codec.py): infinity is no limit and no deadline, `prefixes` are chain hashes of the prompt's blocks,
--             separated by spaces, `digest` is of the request or '', `is_served` if its router already serves it,
--             `adapter` is a hash or ''
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
-- With `is_served` neither is done to a request that another living router serves or that was cancelled, and without a
-- digest the id is enough. A request that had an attempt was admitted before: neither rates nor bounds refuse it.
-- A request with several choices is admitted with its first one: that takes the rates of all of them, counts as one
-- request in the rate of requests, and the others must fit in the queue. They come with 0 choices: neither rates nor
-- bounds refuse them.
-- Requests that already wait could not be placed when a seat last opened, so boarding is tried only if there is room
-- for this request, or an earlier call stopped half-way.
local asked = {} -- the request at hand
local request_ms, token_ms -- of its tenant, before this request
local newest_report -- of all executors

-- Whether this is the requested one: by its digest, or by its router, which has no digest of it.
local function is_same(known)
  return known.digest == '?' and (asked.digest ~= '' or asked.is_served)
    or known.digest == asked.digest and (asked.digest ~= '' or asked.is_served)
      and (known.tenant == asked.tenant or known.tenant == '')
end

-- Whether the caller repeats a request that it owns.
local function is_own_repeat(known)
  return known.owner == CALLER and (is_same(known) or asked.digest == '' and known.digest == ''
    and known.tenant == asked.tenant and known.asked_class == asked.class
    and known.deadline_in_ms == asked.deadline_in_ms
    and known.blocks == asked.blocks and known.sequences == asked.sequences)
end

-- Makes the caller the owner of the request in its current state; one that has just lost its executor is enqueued again
-- first. That is no failure if the caller, its owner, never learned of the placement, and so did not submit it.
local function adopt(known)
  if not owners.reachable(known.owner) then
    return {'AGAIN'}
  end
  local was_told = known.owner ~= CALLER or asked.last_attempt >= known.attempt
  states.take_over(asked.id, known)
  if known.digest ~= '?' or known.state ~= 'PLACED' then -- otherwise the executor returns the request to the router that attaches
    known.digest = asked.digest
  end
  if known.state ~= 'LOST' then
    known.adopted = known.state == 'PLACED'
    save_request(asked.id, known)
    return states.standing(asked.id, known)
  end
  states.withdraw(asked.id, known)
  if was_told then
    states.record_failure(known, asked.output > known.output)
  end
  states.set_placement_blocks(known, asked.placement_blocks)
  states.requeue(asked.id, known, asked.output)
  return nil
end

-- Handles a request that is known already.
local function repeat_of(known)
  local outcome
  local is_owner_free = not asked.is_served or known.owner == CALLER or not owners.lives(known.owner)
  if is_same(known) and is_owner_free and (known.owner ~= CALLER or known.state == 'LOST') then
    outcome = adopt(known)
  elseif not is_own_repeat(known) or known.state == 'LOST' then
    outcome = {'DUPLICATE', known.state}
  elseif known.state == 'PLACED' or not state.unboarded then
    outcome = states.standing(asked.id, known)
  end
  if outcome then
    return outcome
  end
  board.run() -- it was enqueued again, or an earlier call for that stopped half-way
  known = load_request(asked.id)
  if not known then
    return {'DROPPED'}
  end
  return known.state == 'WAITING' and #missing > 0 and {'AGAIN'} or states.standing(asked.id, known)
end

-- Handles a request that ended recently: returns an outcome, or nil and the attempt after which it starts again.
local function repeat_of_ended()
  local ending = states.load_ending(asked.id)
  local is_other = ending and ending.digest ~= asked.digest and ending.digest ~= '?'
  if asked.digest == '' and not asked.is_served or is_other then
    return {'DUPLICATE', 'ENDED'}
  elseif ending and not ending.cancelled then
    return states.placed_once(ending)
  elseif asked.is_served then
    return {'DUPLICATE', 'ENDED'}
  end
  return nil, ending and ending.attempt or 0
end

local function is_served_anywhere(adapter)
  for _, executor_id in ipairs(redis.call('ZRANGE', SIZES, '0', places.MAX_SERVING - 1)) do
    if adapters.serves(load_executor(executor_id), adapter) then
      return true
    end
  end
  return false
end

-- Returns why no executor can run the request, now or ever.
local function impossible(request)
  local fitting = kept.fitting and executors[kept.fitting]
  if places.would_hold(fitting, request) and NOW - fitting.last_report_ms <= LEASE_MS then
    return nil
  end
  newest_report = newest_report or redis.call('ZREVRANGE', REPORTS, '0', '0', 'WITHSCORES')
  if #newest_report == 0 or NOW - tonumber(newest_report[2]) > LEASE_MS then
    return {'REFUSED', 'NO_EXECUTOR', '', ''}
  end
  if places.fits_somewhere(request) then
    return nil
  elseif request.adapter ~= '' and not is_served_anywhere(request.adapter) then
    return {'REFUSED', 'NO_EXECUTOR', 'adapter', ''} -- its executors may be about to report
  end
  return {'REFUSED', 'NEVER_FITS', '', ''}
end

-- Returns the bound of the tenant or the pool that is exceeded when so many more choices like this one wait.
local function exceeded(request, tenant, more)
  local tokens = more * reserved_tokens(request)
  return tenant.waiting + more > asked.max_requests and 'tenant max_queue_requests'
    or tenant.tokens[1] + tenant.tokens[2] + tenant.tokens[3] + tokens > asked.max_tokens and 'tenant max_queue_tokens'
    or tenant.bytes + more * asked.bytes > asked.max_bytes and 'tenant max_queue_bytes'
    or state.waiting + more > asked.max_pool_requests and 'max_queue_requests'
    or state.tokens[1] + state.tokens[2] + state.tokens[3] + tokens > asked.max_pool_tokens and 'max_queue_tokens'
    or state.bytes + more * asked.bytes > asked.max_pool_bytes and 'max_queue_bytes'
    or nil
end

-- Returns why it may not wait: its deadline would be missed, or the queue is full; nil if it may.
local function refusal_of_waiting(request, tenant, wait_ms)
  if asked.last_attempt > 0 or asked.output > 0 then
    return nil
  end
  local limit = asked.choices > 0 and exceeded(request, tenant, asked.choices - 1)
  if limit then
    return {'REFUSED', 'QUEUE_FULL', limit, wait_ms and math.max(100, math.min(60000, math.ceil(wait_ms / 4))) or ''}
  end
  local seat_ms = (wait_ms or 0) + estimates.standby_ms(request)
  local first_token_ms = seat_ms * estimates.MARGIN + estimates.prefill_ms(request)
  local late_ms, missed = first_token_ms - asked.deadline_in_ms, 'first token deadline'
  local output_ms = estimates.output_ms(request)
  if late_ms <= 0 and output_ms <= asked.total_in_ms then -- a longer output is meant to be cut off by its deadline
    late_ms, missed = first_token_ms + output_ms - asked.total_in_ms, 'deadline'
  end
  if late_ms > 0 then
    return {'REFUSED', 'DEADLINE_UNMEETABLE', missed, math.ceil(math.max(100, math.min(60000, late_ms)))}
  end
  return nil
end

-- Removes a request that was just enqueued, and returns its rate tokens.
local function take_back(request, tenant)
  states.withdraw(asked.id, request)
  delete_request(asked.id)
  tenant.request_ms, tenant.token_ms = request_ms, token_ms
end

-- Handles a request that is not placed at once: one known already, or one to enqueue. Returns the outcome.
local function without_seat(known, request, executor_id)
  if known then
    return repeat_of(known)
  end
  local tenant = load_tenant(asked.tenant)
  local refused = not executor_id and impossible(request)
  if refused then
    tenant.request_ms, tenant.token_ms = request_ms, token_ms
    save_tenant(asked.tenant, tenant) -- its limits may be new
    return refused
  end
  states.enqueue(asked.id, request)
  if executor_id or state.unboarded then
    save_request(asked.id, request)
    board.run()
    request = load_request(asked.id)
  end
  if not request then
    return {'DROPPED'}
  elseif request.state == 'PLACED' then
    return states.standing(asked.id, request)
  elseif #missing > 0 then -- requests ahead of it could not be placed
    take_back(request, tenant)
    return {'AGAIN'}
  end
  local ahead, wait_ms = states.outlook(asked.id, request)
  refused = refusal_of_waiting(request, tenant, wait_ms)
  if refused then
    take_back(request, tenant)
    return refused
  end
  request.estimate, request.correction = wait_ms or math.huge, tenant.correction
  save_request(asked.id, request)
  return {'QUEUED', ahead, wait_ms or ''}
end

-- Handles the request at hand. Returns its outcome.
local function submit()
  if asked.choices == 0 and not asked.is_served and states.has_lost_first_choice(asked.id) then
    return {'REFUSED', 'TAKEN_OVER', '', ''}
  end
  local known = load_request(asked.id)
  if known then
    return without_seat(known)
  end
  local ended, first_attempt = states.ended_ms(asked.id), asked.last_attempt + 1
  if ended then
    local outcome, spent = repeat_of_ended()
    if outcome then
      return outcome
    end
    first_attempt = math.max(first_attempt, spent + 1)
  end

  local tenant = load_tenant(asked.tenant)
  state.max_bypass, state.age_ms, state.preempts = asked.max_bypass, asked.age_ms, asked.preempts == 1
  state.remember_ms, state.tolerated_ttft_ms = asked.remember_ms, asked.tolerated_ttft_ms
  request_ms, token_ms = tenant.request_ms, tenant.token_ms
  local request = states.new_request(CALLER, asked, first_attempt - 1)
  if asked.last_attempt == 0 and asked.output == 0 then
    local limit = asked.choices > 1 and exceeded(request, tenant, asked.choices - 1)
    if limit then
      return {'REFUSED', 'QUEUE_FULL', limit, ''}
    end
    local wait_ms
    if asked.choices > 0 then
      local tokens = asked.choices * reserved_tokens(request)
      limit, wait_ms = tenants.take_rates(tenant, asked, tokens)
    end
    if limit then
      return {'REFUSED', 'RATE_LIMITED', limit, wait_ms}
    end
    request.rated = asked.ms_per_token > 0 and reserved_tokens(request) or 0
  end
  tenant.weight, tenant.max_running, tenant.ms_per_token = asked.weight, asked.max_running, asked.ms_per_token
  save_tenant(asked.tenant, tenant)

  local is_first = state.waiting == 0 and tenant.running < tenant.max_running
  local executor_id, reserved, cached = places.choose(asked.id, request)
  if is_first and executor_id and not board.is_dead(request) then -- it need not be enqueued first, which halves the work
    states.seat(asked.id, request, executor_id, first_attempt, reserved, cached)
    prefix.remember_prefixes(request, executor_id)
    if ended then
      states.forget_end(asked.id)
    end
    return states.placed(request)
  end
  local outcome = without_seat(nil, request, executor_id)
  if ended and (outcome[1] == 'PLACED' or outcome[1] == 'QUEUED') then
    states.forget_end(asked.id)
  end
  return outcome
end

local function run()
  newest_report = nil
  if owners.is_late(ARGV[2]) then
    return reply.finish({'LATE'})
  end
  owners.register()
  local outcomes, at = {}, 3
  while at <= #ARGV do
    at = read_submit(asked, at)
    outcomes[#outcomes + 1] = submit()
  end
  return reply.finish({'SUBMITTED', outcomes})
end

script('submit', run, {})
