-- States: a request is in exactly one, and `withdraw` takes it out of any of them:
--   WAITING  queued: in `waiting:<class>` and, below the first class, `ageing`; counted by its tenant
--   PLACED   reserved on an executor: in `placements` and in the executor's reserved sums; counted by its tenant
--   LOST     taken back from an executor; its owner was notified and hands it back or settles it: in `lost`
-- It ends by leaving `requests` for a tombstone in `ended`; for a placed request `endings` has its executor, so that a
-- router can attach to it. A request whose executor was lost before its first token has a failure and is a suspect: an
-- executor runs one suspect at a time. `undecided` has the failures for which it is not known yet whether the executor
-- died, `counted` the last attempt whose loss is already counted.
--
-- Queues are ordered by name: tenant, then deadline (at most PATIENCE_MS away), then arrival. A tenant's queue is a
-- range.

function states.queue_range(tenant)
  return '[' .. tenant .. '\0', '(' .. tenant .. '\1'
end

function states.queue_member(id, request)
  return request.tenant .. '\0' .. string.format('%013d%013d', request.order_ms, request.arrival) .. id
end

function states.id_of_member(tenant, member)
  return member:sub(#tenant + 28)
end

states.NUM_READ = 8 -- members of a tenant's queue kept in its head: as many placements need no reading

-- `tenant.heads[class]` has the first members of the tenant's queue of a class, as they are with the writes of this call,
-- and the order of the last of them, or of one that was behind it and has left: see board.lua. A member that comes behind
-- them is added if the head `is_whole`, that is, has all members, so a short queue is not read again. One that comes in
-- between ends the head.
local function join_head(tenant, request, member)
  local head = tenant.heads and tenant.heads[request.class]
  if not head then
    return
  elseif request.order_ms < head.order_ms or request.order_ms == head.order_ms and request.arrival < head.arrival then
    tenant.heads[request.class] = nil
  elseif head.is_whole and #head < states.NUM_READ then
    head[#head + 1], head.order_ms, head.arrival = member, request.order_ms, request.arrival
  else
    head.is_whole = false
  end
end

local function leave_head(tenant, class, member)
  local head = tenant.heads and tenant.heads[class]
  for i = 1, head and #head or 0 do
    if head[i] == member then
      table.remove(head, i)
      break
    end
  end
end

local function placement_member(executor_id, attempt, id)
  return executor_id .. '\0' .. string.format('%d', attempt) .. '\0' .. id
end

function states.placements_of(executor_id)
  return '[' .. executor_id .. '\0', '(' .. executor_id .. '\1'
end

-- Adds the request to the counts of its tenant and the pool (`sign` 1), or subtracts it (-1), for the given `class`.
function states.count_waiting(request, sign, class)
  class = class or request.class
  local tenant, tokens = load_tenant(request.tenant), reserved_tokens(request)
  tenant.waiting, tenant.bytes = tenant.waiting + sign, tenant.bytes + sign * request.bytes
  tenant.waiting_by_class[class] = tenant.waiting_by_class[class] + sign
  tenant.tokens[class] = tenant.tokens[class] + sign * tokens
  state.waiting, state.bytes = state.waiting + sign, state.bytes + sign * request.bytes
  state.waiting_by_class[class] = state.waiting_by_class[class] + sign
  state.tokens[class] = state.tokens[class] + sign * tokens
  save_tenant(request.tenant, tenant)
  if state.waiting == 0 then
    estimates.stop_measuring()
  end
end

-- Releases the executor that is claimed for the request.
function states.unclaim(request)
  for i, claim in ipairs(claims) do
    if claim.executor_id == request.claim then
      table.remove(claims, i)
      break
    end
  end
  save_claims()
  local executor = load_executor(request.claim)
  if executor then
    executor.claim = ''
    save_executor(request.claim, executor)
  end
  request.claim = ''
end

-- Makes a new request from the fields of `asked`. If only an executor knew of it, it has no owner, the tenant '' and the
-- digest '?', which fits any.
function states.new_request(owner, asked, attempt)
  state.arrivals = state.arrivals + 1
  return {
    owner = owner, tenant = asked.tenant, prefixes = asked.prefixes, digest = asked.digest, class = asked.class,
    asked_class = asked.class, deadline_in_ms = asked.deadline_in_ms, deadline_ms = NOW + asked.deadline_in_ms,
    order_ms = NOW + math.min(asked.deadline_in_ms, PATIENCE_MS), since_ms = NOW, arrival = state.arrivals,
    blocks = asked.blocks, placement_blocks = asked.placement_blocks, sequences = asked.sequences,
    prompt = asked.prompt, max = asked.max, output = asked.output, block_size = asked.block_size, bytes = asked.bytes,
    attempt = attempt, failures = 0, undecided = '', counted = 0, passed = 0, state = '', executor_id = '', claim = '',
    estimate = math.huge, correction = 1, charged = false, adopted = false, charge = 0, rated = 0, generation = 0,
    placed_ms = 0, reserved = 0, preempting = 0, adapter = asked.adapter,
  }
end

-- Enqueues the request by its original order key. The caller saves it.
function states.enqueue(id, request)
  request.state = 'WAITING'
  local member = states.queue_member(id, request)
  write_later('ZADD', KEYS[WAITING + request.class], '0', member)
  join_head(load_tenant(request.tenant), request, member)
  if request.class > 1 then
    write_later('ZADD', AGEING, string.format('%d', NOW + state.age_ms), id)
    state.next_age_ms = math.min(state.next_age_ms, NOW + state.age_ms)
  end
  states.count_waiting(request, 1)
end

local function leave_queue(id, request)
  local member = states.queue_member(id, request)
  write_later('ZREM', KEYS[WAITING + request.class], member)
  leave_head(load_tenant(request.tenant), request.class, member)
  if request.class > 1 then
    write_later('ZREM', AGEING, id)
  end
  if request.claim ~= '' then
    states.unclaim(request)
  end
  states.count_waiting(request, -1)
end

-- Placements after which a request keeps its place, so that it ends however many others come. Executors have the same bound.
local MAX_YIELDING_ATTEMPTS = 8

-- Whether a placed request gives way to a waiting one of a higher class. One of the last class does without the setting.
function states.is_preemptible(request)
  return request.attempt <= MAX_YIELDING_ATTEMPTS
    and (request.class == NUM_CLASSES or state.preempts and request.class > 1)
end

local function leave_executor(id, request)
  write_later('ZREM', PLACEMENTS, placement_member(request.executor_id, request.attempt, id))
  if states.is_preemptible(request) then
    redis.call('ZREM', PREEMPTIBLE, id)
  end
  local executor = load_executor(request.executor_id)
  if executor then
    executor.reserved_blocks = executor.reserved_blocks - request.reserved
    executor.reserved_sequences = executor.reserved_sequences - request.sequences
    executor.has_suspect = executor.has_suspect and request.failures == 0
    if request.adapter ~= '' then
      adapters.count_pin(executor, request.adapter, -1)
    end
    save_executor(request.executor_id, executor)
  end
  local tenant = load_tenant(request.tenant)
  tenant.running = tenant.running - request.sequences
  save_tenant(request.tenant, tenant)
end

-- Removes the request from its state; its reservation returns to its executor.
function states.withdraw(id, request)
  if request.state == 'WAITING' then
    leave_queue(id, request)
  elseif request.state == 'PLACED' then
    leave_executor(id, request)
  elseif request.state == 'LOST' then
    redis.call('ZREM', LOST, id)
  end
end

-- Adds the prompt to those that the executor is to compute.
local function expect_prefill(request, executor, cached)
  if executor.prefill_speed > 0 then
    local tokens = math.max(0, request.prompt + request.output - cached)
    executor.prefilled_ms = math.max(NOW, executor.prefilled_ms) + tokens / executor.prefill_speed
  end
end

-- Reserves blocks and sequences of the executor for this attempt, and charges the tenant. `cached` are the tokens that
-- the executor need not compute, nil for a request that it runs already.
function states.seat(id, request, executor_id, attempt, blocks, cached)
  local executor, tenant = load_executor(executor_id), load_tenant(request.tenant)
  tenants.charge(request, tenant)
  request.state, request.attempt, request.placed_ms = 'PLACED', attempt, NOW
  request.executor_id, request.generation, request.reserved = executor_id, executor.generation, blocks
  request.passed, request.preempting, request.estimate, request.adopted = 0, 0, math.huge, false
  executor.reserved_blocks = executor.reserved_blocks + blocks
  executor.reserved_sequences = executor.reserved_sequences + request.sequences
  executor.has_suspect = executor.has_suspect or request.failures > 0
  if request.adapter ~= '' then
    adapters.count_pin(executor, request.adapter, 1)
  end
  if cached then
    expect_prefill(request, executor, cached)
  end
  save_executor(executor_id, executor)
  tenant.running = tenant.running + request.sequences
  save_tenant(request.tenant, tenant)
  write_later('ZADD', PLACEMENTS, '0', placement_member(executor_id, attempt, id))
  if states.is_preemptible(request) then
    redis.call('ZADD', PREEMPTIBLE, request.class * 1e13 + NOW, id)
  end
  save_request(id, request)
end

-- Whether the executor of a failure has died; nil while that is unknown. It died if it started again or its lease
-- lapsed, and is alive if the same generation reported again. A report relayed within RELAY_MS may be older. One that
-- has stalled reports on, and accepts work again once its engine has made a step.
local function has_died(one)
  local executor = load_executor(one.executor_id)
  if not executor or executor.generation ~= one.generation then
    return true
  elseif executor.last_report_ms > one.at_ms + RELAY_MS and (executor.accepting or not one.stalled) then
    return false
  end
  return nil
end

function states.clear_failures(request)
  request.failures, request.undecided = 0, ''
end

-- Decides the failures that can be decided: one whose executor died stays, one whose executor lives is removed. Returns
-- how many are undecided, and how many more are stalls that last.
function states.decide_failures(request)
  local undecided, num_stalls = {}, 0
  for _, one in ipairs(request.undecided ~= '' and cmsgpack.unpack(request.undecided) or {}) do
    local died = has_died(one)
    if died == nil then
      undecided[#undecided + 1] = one
      num_stalls = num_stalls + (one.stalled and 1 or 0)
    elseif not died then
      request.failures = request.failures - 1
    end
  end
  request.undecided = #undecided > 0 and cmsgpack.pack(undecided) or ''
  return #undecided - num_stalls, num_stalls
end

-- Counts the loss of a placement against the request, once. If the placement produced tokens, all failures are cleared.
-- An executor whose same generation got the request again has not died before. `stalled`: its engine stalls.
function states.record_failure(request, progressed, stalled)
  if progressed then
    states.clear_failures(request)
    return
  elseif request.counted == request.attempt then
    return
  end
  local undecided = {}
  for _, one in ipairs(request.undecided ~= '' and cmsgpack.unpack(request.undecided) or {}) do
    if one.executor_id == request.executor_id and one.generation == request.generation then
      request.failures = request.failures - 1
    else
      undecided[#undecided + 1] = one
    end
  end
  undecided[#undecided + 1] = {
    executor_id = request.executor_id, generation = request.generation, at_ms = NOW, stalled = stalled or false,
  }
  request.failures, request.counted = request.failures + 1, request.attempt
  request.undecided = #undecided > 0 and cmsgpack.pack(undecided) or ''
end

-- Sets the blocks of the next placement. What it reserves beyond the placement before is charged to the tenant and
-- taken from its rate.
function states.set_placement_blocks(request, blocks)
  local before = reserved_tokens(request)
  request.placement_blocks, request.blocks = blocks, math.max(request.blocks, blocks)
  local tokens = reserved_tokens(request) - before
  if tokens <= 0 then
    return
  end
  local tenant = load_tenant(request.tenant)
  if request.charged then
    local charge = tenants.OUTPUT_WEIGHT * tenant.output_share * tokens / tenant.weight
    request.charge, tenant.counter = request.charge + charge, tenant.counter + charge
  end
  if request.rated > 0 then
    request.rated, tenant.token_ms = request.rated + tokens, tenant.token_ms + tokens * tenant.ms_per_token
  end
  save_tenant(request.tenant, tenant)
end

-- Enqueues a request that has left its executor at its former position, owned by the caller.
function states.requeue(id, request, output)
  request.owner, request.executor_id, request.generation, request.placed_ms = CALLER, '', 0, 0
  request.reserved, request.output, request.adopted = 0, math.max(output, request.output), false
  states.enqueue(id, request)
  save_request(id, request)
end

-- Whether another living router has taken over the first choice of a request, of which `id` is a later one. That router
-- takes over, or submits, the later ones, too; of several calls, the one that took the first choice last gets them all.
function states.has_lost_first_choice(id)
  local first_id = string.match(id, '^(.*)~%d+$')
  local request = first_id and load_request(first_id)
  return request and request.owner ~= CALLER and owners.lives(request.owner)
end

-- Makes the caller the owner and notifies the previous owner. The caller has checked that it is reachable, and saves
-- it.
function states.take_over(id, request)
  if request.owner ~= CALLER then
    owners.notify('taken_over', id, request)
    request.owner = CALLER
  end
end

-- Marks a withdrawn request as lost, for its owner to handle.
function states.set_lost(id, request)
  request.state = 'LOST'
  save_request(id, request)
  redis.call('ZADD', LOST, NOW_TEXT, id)
end

-- Takes a placement back and leaves the rest to its owner. A dead owner is not waited for. If the executor lives and
-- only does not hold the request, that is no failure. Returns false, and does nothing, if the owner cannot be notified.
function states.lose(id, request, executor_lives)
  if not owners.reachable(request.owner) then
    return false
  end
  states.withdraw(id, request)
  if owners.lives(request.owner) then
    if executor_lives then
      request.counted = request.attempt
    end
    states.set_lost(id, request)
    owners.notify('lost', id, request)
  else
    delete_request(id)
  end
  return true
end

-- Removes up to `limit` expired tombstones.
function states.sweep_tombstones(limit)
  flush_writes(ENDED)
  flush_writes(ENDINGS)
  local old = redis.call('ZRANGEBYSCORE', ENDED, '-inf', string.format('%d', NOW - state.remember_ms - 1), 'LIMIT', '0', limit)
  if #old > 0 then
    redis.call('ZREM', ENDED, unpack(old))
    redis.call('HDEL', ENDINGS, unpack(old))
  end
end

-- Leaves a tombstone: the id has ended. Each new tombstone sweeps two expired ones, which keeps `ended` from growing.
function states.add_tombstone(id)
  delete_request(id)
  write_later('ZADD', ENDED, NOW_TEXT, id)
end

-- Leaves a tombstone that also records how a placed request ended: a repeat of a cancelled request starts again, any
-- other repeat attaches to the output that its executor has kept.
function states.add_tombstone_with_ending(id, request, cancelled)
  states.add_tombstone(id)
  if request.attempt > 0 then
    local ending = {
      executor_id = request.executor_id, digest = request.digest, attempt = request.attempt,
      generation = request.generation, cancelled = cancelled,
    }
    write_later('HSET', ENDINGS, id, pack_ending(ending))
  end
end

-- Removes the tombstone of the id.
function states.forget_end(id)
  write_later('ZREM', ENDED, id)
  write_later('HDEL', ENDINGS, id)
end

-- Returns how a request with a tombstone ended; nil if it was never placed.
function states.load_ending(id)
  flush_writes(ENDINGS)
  local text = redis.call('HGET', ENDINGS, id)
  return text and unpack_ending(text) or nil
end

-- Returns when the id ended, or nil if that is not known (any more).
function states.ended_ms(id)
  flush_writes(ENDED)
  local ended = redis.call('ZSCORE', ENDED, id)
  if ended and NOW - tonumber(ended) <= state.remember_ms then
    return tonumber(ended)
  elseif ended then
    states.forget_end(id)
  end
  return nil
end

function states.num_ahead_in_tenant(id, request)
  local tenant = load_tenant(request.tenant)
  local num_queued = tenant.waiting_by_class[request.class]
  if num_queued <= 1 then
    return 0
  elseif request.order_ms == NOW + PATIENCE_MS and request.arrival == state.arrivals then -- nothing can come behind it
    return num_queued - 1
  end
  local first = states.queue_range(request.tenant)
  flush_writes(KEYS[WAITING + request.class])
  return redis.call('ZLEXCOUNT', KEYS[WAITING + request.class], first, '(' .. states.queue_member(id, request))
end

-- Returns the outcome for a PLACED request. The executor may already hold one that was adopted.
function states.placed(request)
  return {
    request.adopted and 'ADOPTED' or 'PLACED', request.attempt, request.executor_id, request.generation,
    request.reserved, request.failures > 0 and 1 or 0, request.adapter,
  }
end

-- Returns the outcome for an ended request whose placement is known.
function states.placed_once(ending)
  return {'ADOPTED_ENDED', ending.attempt, ending.executor_id, ending.generation, 0, 0, ''}
end

-- Returns the number of requests ahead in the queue, and the estimated wait or nil.
function states.outlook(id, request)
  local ahead = estimates.num_ahead(request, states.num_ahead_in_tenant(id, request))
  return ahead, estimates.estimated_wait(request, ahead)
end

-- Returns the outcome for a WAITING or PLACED request. An estimate of '' is none.
function states.standing(id, request)
  if request.state == 'PLACED' then
    return states.placed(request)
  end
  local ahead, wait_ms = states.outlook(id, request)
  return {'QUEUED', ahead, wait_ms or ''}
end
