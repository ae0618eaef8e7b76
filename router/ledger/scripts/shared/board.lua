-- Board: places as many waiting requests as fit, in fair order. Ends every script that may have freed a seat.
--
-- Order: class, then the active tenant with the smallest counter, then deadline and arrival. A request that does not
-- fit may be bypassed by up to MAX_PASSED others that do, `max_bypass` times in all. Then an executor is claimed for
-- it, or, if none can be, the queue waits for it. A request whose claimed executor has room goes first: requests that
-- were enqueued again ahead of it could hold that executor, with no other place to go.
local MAX_PASSED = 4
local MAX_AGED = 16         -- requests moved up a class by one call
local MAX_VICTIMS = 8       -- placements looked at to find room for a higher class
local PREEMPTION_MS = 2000  -- until a request may preempt others again

-- Moves requests that have waited long up by a class.
local function promote_aged()
  if NOW < state.next_age_ms then
    return
  end
  flush_writes(AGEING)
  for class = 1, NUM_CLASSES do
    flush_writes(KEYS[WAITING + class])
  end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', AGEING, '-inf', NOW_TEXT, 'LIMIT', '0', MAX_AGED)) do
    redis.call('ZREM', AGEING, id)
    local request = load_request(id)
    if request and request.state == 'WAITING' then
      local tenant = load_tenant(request.tenant)
      tenant.heads = false
      redis.call('ZREM', KEYS[WAITING + request.class], states.queue_member(id, request))
      local left = request.class
      request.class = left - 1
      redis.call('ZADD', KEYS[WAITING + request.class], '0', states.queue_member(id, request))
      if request.class > 1 then
        redis.call('ZADD', AGEING, string.format('%d', NOW + state.age_ms), id)
      end
      states.count_waiting(request, 1)
      states.count_waiting(request, -1, left)
      for _, claim in ipairs(claims) do
        claim.class = claim.id == id and request.class or claim.class
      end
      save_claims()
      save_request(id, request)
    end
  end
  local first = redis.call('ZRANGE', AGEING, '0', '0', 'WITHSCORES')
  state.next_age_ms = first[2] and tonumber(first[2]) or math.huge
end

-- Drops a queue entry whose record was evicted, or does not wait because a call failed half-way, and subtracts what is known
-- of it from the counts.
local function drop_entry(class, name, member)
  redis.call('ZREM', KEYS[WAITING + class], member)
  local tenant = load_tenant(name)
  tenant.heads = false
  tenant.waiting_by_class[class], tenant.waiting = math.max(0, tenant.waiting_by_class[class] - 1), math.max(0, tenant.waiting - 1)
  state.waiting, state.waiting_by_class[class] = math.max(0, state.waiting - 1), math.max(0, state.waiting_by_class[class] - 1)
  save_tenant(name, tenant)
end

-- Returns the first request whose claimed executor has room now.
local function next_kept()
  for _, claim in ipairs(claims) do
    local request, executor = load_request(claim.id), load_executor(claim.executor_id)
    local tenant = request and load_tenant(request.tenant)
    examined[claim.id] = true
    if request and tenant.active and places.takes_work(executor) and places.room_for(request, executor) then
      return claim.id, request
    end
  end
  return nil
end

-- Returns the first members of a tenant's queue, at least `count` if there are so many.
local function first_members(class, name, count)
  local tenant = load_tenant(name)
  local head = tenant.heads and tenant.heads[class]
  if not head or #head < count and not head.is_whole then
    flush_writes(KEYS[WAITING + class])
    local first, last = states.queue_range(name)
    head = redis.call('ZRANGEBYLEX', KEYS[WAITING + class], first, last, 'LIMIT', '0', states.NUM_READ)
    head.is_whole, head.order_ms, head.arrival = #head < states.NUM_READ, 0, 0
    if #head > 0 then
      local order = head[#head]:sub(#name + 2, #name + 27)
      head.order_ms, head.arrival = tonumber(order:sub(1, 13)), tonumber(order:sub(14))
    end
    tenant.heads = tenant.heads or {}
    tenant.heads[class] = head
  end
  return head
end

-- Returns the first request in fair order that was not bypassed in this call.
local function next_in_queue(passed)
  tenants.list_tenants()
  local claimant_id, claimant = next_kept()
  if claimant_id then
    return claimant_id, claimant
  end
  local count = #passed + 1 -- of the first ones, some of which were passed
  for class = 1, NUM_CLASSES do
    local before = {}
    for num_before = 0, #passed do
      local name = tenants.next_tenant(class, before, num_before)
      if not name then
        break
      end
      before[name] = true
      local members = first_members(class, name, count)
      for i = 1, math.min(count, #members) do
        local id = states.id_of_member(name, members[i])
        if not passed[id] then
          local request = load_request(id)
          if request and request.state == 'WAITING' then
            return id, request
          end
          drop_entry(class, name, members[i])
          return id, nil
        end
      end
    end
  end
  return nil
end

-- Removes the request from the queue for good: 'drop', or 'hold' if its owner cannot be notified.
local function drop(kind, id, request)
  if not owners.reachable(request.owner) then
    return 'hold'
  end
  states.withdraw(id, request)
  states.add_tombstone_with_ending(id, request, true)
  states.sweep_tombstones(2)
  tenants.refund(request)
  owners.notify(kind, id, request)
  return 'drop'
end

-- Whether its deadline would pass before its first token. A request with output has met it.
function board.is_dead(request)
  return request.output == 0 and NOW + estimates.prefill_ms(request) / 2 > request.deadline_ms
end

-- Returns the newest placements of lower classes on one executor whose preemption makes room; nil if there are none.
-- Their owners hand them back, and then the request, which is first, gets the room, unless the executor is claimed by
-- another.
local function preempt_for(id, request)
  if NOW - request.preempting < PREEMPTION_MS
    or not state.preempts and request.asked_class == NUM_CLASSES then -- one that moved up would take turns with others
    return
  end
  local lowest = (request.class + 1) * 1e13
  local executor_id, blocks, sequences, victims, pins = nil, 0, 0, {}, nil
  for _, victim_id in ipairs(redis.call('ZREVRANGEBYSCORE', PREEMPTIBLE, '+inf', lowest, 'LIMIT', '0', MAX_VICTIMS)) do
    local victim = load_request(victim_id)
    if not victim or victim.state ~= 'PLACED' then
      redis.call('ZREM', PREEMPTIBLE, victim_id)
      victim = nil
    end
    local executor = victim and load_executor(victim.executor_id)
    local may_use = places.takes_work(executor) and (executor.claim == '' or executor.claim == id)
      and suspects.allows(request, executor)
      and (request.adapter == '' or adapters.serves(executor, request.adapter))
    if may_use and (not executor_id or executor_id == victim.executor_id) and owners.lives(victim.owner) then
      if not executor_id then
        executor_id, blocks = victim.executor_id, available_blocks(executor)
        sequences = executor.budget_sequences - executor.reserved_sequences
        pins = request.adapter ~= '' and adapters.pins_of(executor)
      end
      local needed = lengths.needed_blocks(request, executor)
      local needs_slot_only = pins and blocks >= needed and sequences >= request.sequences
      if not needs_slot_only or victim.adapter ~= '' then
        victims[#victims + 1] = {victim_id, victim}
        blocks, sequences = blocks + victim.reserved, sequences + victim.sequences
      end
      if pins and victim.adapter ~= '' then
        pins[victim.adapter] = pins[victim.adapter] > 1 and pins[victim.adapter] - 1 or nil
      end
      if blocks >= needed and sequences >= request.sequences
        and (not pins or adapters.may_pin(executor, request.adapter, pins)) then
        return victims
      end
    end
  end
  return nil
end

-- Whether waiting requests may preempt placed ones.
local function may_preempt()
  return (state.preempts or state.waiting > state.waiting_by_class[NUM_CLASSES]) and redis.call('ZCARD', PREEMPTIBLE) > 0
end

-- Decides on a request that does not fit: 'drop' it, 'pass' it, or 'hold' the queue for it.
local function handle_head_of_line(id, request)
  if not places.fits_somewhere(request) and redis.call('ZCARD', SIZES) > 0 then
    return drop('never_fits', id, request)
  end
  local victims = may_preempt() and preempt_for(id, request)
  for _, one in ipairs(victims or {}) do
    local victim = one[2]
    if not owners.reachable(victim.owner) then
      return 'hold'
    end
  end
  for _, one in ipairs(victims or {}) do
    redis.call('ZREM', PREEMPTIBLE, one[1])
    owners.notify('preempt', one[1], one[2])
  end
  if victims then
    request.preempting = NOW
    save_request(id, request)
  end
  if request.claim ~= '' and not places.could_hold(load_executor(request.claim), request) then
    states.unclaim(request)
    save_request(id, request)
  end
  if request.claim == '' and request.passed >= state.max_bypass then
    if not places.claim_executor(id, request) then
      return 'hold'
    end
    save_request(id, request)
  end
  return 'pass'
end

-- Handles the head of the queue: 'seat', 'drop', 'pass' or 'hold'. Only an owner that has to be told must be reachable: one of a
-- request that does not fit need not, so calls are not repeated for its mailbox.
local function board_one(id, request)
  if not owners.lives(request.owner) then
    states.withdraw(id, request)
    delete_request(id)
    return 'drop'
  end
  if board.is_dead(request) then
    return drop('expired', id, request)
  end
  local executor_id, blocks, cached = places.choose(id, request)
  if not executor_id then
    return handle_head_of_line(id, request)
  elseif not owners.reachable(request.owner) then
    return 'hold'
  end
  estimates.observe_wait(request)
  states.withdraw(id, request)
  states.seat(id, request, executor_id, request.attempt + 1, blocks, cached)
  prefix.remember_prefixes(request, executor_id)
  owners.notify('placed', id, request)
  return 'seat'
end

-- Counts a bypass of these requests. Returns whether more bypasses are allowed.
local function count_passes(passed)
  local may_pass = true
  for _, id in ipairs(passed) do
    local request = load_request(id)
    request.passed = request.passed + 1
    if request.claim == '' and request.passed >= state.max_bypass then
      may_pass = places.claim_executor(id, request) and may_pass
    end
    save_request(id, request)
  end
  return may_pass
end

-- `state.unboarded` stays set if a call stopped before it had tried all waiting requests: the next call continues.
function board.run()
  state.unboarded = false
  if state.waiting == 0 then
    return
  end
  promote_aged()
  local passed, num_boarded = {}, 0
  for _ = 1, MAX_HEADS do
    if state.waiting == 0
      or #claims == 0 and #places.roomiest(1) == 0 and not may_preempt() then
      return
    elseif num_boarded == MAX_BOARDED then
      break
    end
    local id, request = next_in_queue(passed)
    if not id then
      return
    end
    local dealt = request and board_one(id, request) or 'drop'
    examined[id] = true
    if dealt == 'hold' or (dealt == 'seat' and not count_passes(passed)) or
      (dealt == 'pass' and #passed == MAX_PASSED) then
      state.unboarded = #missing > 0
      return
    elseif dealt == 'pass' then
      passed[#passed + 1], passed[id] = id, true
    else
      num_boarded = num_boarded + 1
    end
  end
  more, state.unboarded = 1, true
end
