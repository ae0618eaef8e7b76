-- Places: the choice of the executor for a request.
--
-- `room` has the executors with a free sequence, ordered by available blocks, without the claimed ones. An executor is
-- claimed for a request that was bypassed too often: it serves that request first, and higher classes if no other
-- executor has room. Of the rest the one with most available blocks is taken. A prompt with named prefixes goes where it
-- costs least, in time to compute what is in front of it and what is not cached and in a price for fullness, among the
-- executors that hold a prefix and the one with most available blocks, but not where the prompts in front take longer than
-- the tolerated TTFT, unless they do so on both.
--
-- A request with an adapter goes to an executor where the adapter is resident, or else one with an empty slot, if that
-- is not much fuller than the one with most available blocks.
--
-- FILTERS say whether an executor may take a request: `rule.allows(request, executor)`. COSTS say how many tokens the
-- executor would have to compute, or what is as bad: `rule.cost(request, executor, cached)`. A rule is a file of `rules`,
-- which begins with its parameters, and an entry here.
local FILTERS = {adapters, suspects, fits} -- in the order in which they are asked
local COSTS = {prefix, fullness}

local MAX_CLAIMS = 8
places.MAX_SUSPECT_CANDIDATES = 64 -- executors examined for one without another suspect
places.MAX_ADAPTER_CANDIDATES = 64 -- executors examined for one with a slot for an adapter
places.MAX_SERVING = 1024 -- executors examined for one that serves an adapter

function places.takes_work(executor)
  return executor and executor.accepting and not executor.suspended and NOW - executor.last_report_ms <= SILENT_MS
end

-- The blocks to reserve for the request if there is room for it, whatever the filter `except` says.
function places.room_for(request, executor, except)
  for i = 1, #FILTERS do
    local filter = FILTERS[i]
    if filter ~= except and not filter.allows(request, executor) then
      return nil
    end
  end
  return fits.blocks(request, executor)
end

-- Whether the executor takes work. Removes a silent one from `room`; only a save adds it again.
local function is_heard(id)
  if silent_executors[id] then
    return false
  elseif places.takes_work(load_executor(id)) then
    return true
  end
  silent_executors[id] = true
  write_later('ZREM', ROOM, id)
  return false
end

local room = {} -- what the key had in front when it was read
local num_read = 0 -- how many were asked for
local NONE = {}

at_begin(function()
  if next(room) then room = cleared(room) end
  num_read = 0
end)

local function is_roomier(id, other)
  local blocks, other_blocks = available_blocks(executors[id]), available_blocks(executors[other])
  return blocks > other_blocks or blocks == other_blocks and id < other
end

-- The executors with most available blocks that accept work: those that this call has changed, and of the others as many
-- as are asked for.
function places.roomiest(count)
  if roomiest_found[count] then
    return roomiest_found[count]
  end
  if kept.is_room_empty and not next(dirty_executors) then
    return NONE
  end
  local found = {}
  for id, executor in pairs(dirty_executors) do
    if has_room(executor) and is_heard(id) then
      found[#found + 1] = id
    end
  end
  local at, last = 1, #found + count
  while #found < last do
    if at > #room then
      if #room < num_read or num_read > 32 * count then
        break
      end
      num_read = 2 * math.max(num_read, count, MAX_CANDIDATES)
      room = kept.is_room_empty and {} or redis.call('ZRANGE', ROOM, '0', string.format('%d', num_read - 1))
      kept.is_room_empty = #room == 0
    end
    local id = room[at]
    if id and not dirty_executors[id] and is_heard(id) then
      found[#found + 1] = id
    end
    at = at + 1
  end
  if #found > 1 then
    table.sort(found, is_roomier)
  end
  for i = #found, count + 1, -1 do
    found[i] = nil
  end
  if count == 1 then
    roomiest_found[1] = found
  end
  return found
end

-- The executor on which the prompt costs least, the blocks to reserve there, and the tokens of the prompt that are
-- cached there: one that holds a prefix, or `best`, which has most available blocks. A holder counts unless the prompts in
-- front take longer there than tolerated, and not on `best`. Where no speed is known nothing costs, so the holder of the
-- longest prefix is taken unless it is much fuller, and an executor that has just started is measured soon.
local function cheapest(request, best, best_blocks)
  if request.prefixes == '' then
    return best, best_blocks, 0
  end
  local names, tolerated_ms = prefix.split_prefixes(request.prefixes), prefix.tolerated_wait(request, load_executor(best))
  local seen, chosen, reserved, most_cached, least_ms = {}, nil, nil, 0, math.huge
  local function consider(id, executor, cached)
    if not places.takes_work(executor) or executor.claim ~= '' then
      return
    end
    local wait_ms, speed = prefix.prefill_wait(executor), executor.prefill_speed
    if speed == 0 and fullness.is_much_fuller(executor, load_executor(best)) then
      return
    end
    local blocks = id == best and best_blocks or places.room_for(request, executor)
    if not blocks or id ~= best and cached > 0 and wait_ms > tolerated_ms then
      return
    end
    local tokens = 0
    for i = 1, #COSTS do
      tokens = tokens + COSTS[i].cost(request, executor, cached)
    end
    local ms = speed > 0 and wait_ms + tokens / speed or 0
    if ms < least_ms then
      chosen, reserved, most_cached, least_ms = id, blocks, cached, ms
    end
  end
  local found = prefix.load_holders(request)
  for i = #names, 1, -1 do
    if found[i] and (found[i] ~= found[i + 1] or prefix.names_states()) then
      for id, length, due_ms in found[i]:gmatch(prefix.HOLDER) do
        local cached = not seen[id] and prefix.usable_tokens(request, names, i, id, length, due_ms)
        if cached then
          seen[id] = true
          local executor = load_executor(id)
          -- Looked at first: while requests wait, most holders have no free sequence.
          if executor and executor.budget_sequences - executor.reserved_sequences >= request.sequences then
            consider(id, executor, cached)
          end
        end
      end
    end
  end
  if not seen[best] then
    consider(best, load_executor(best), 0)
  end
  return chosen, reserved, most_cached
end

-- As `choose_open`, for a request with an adapter. `lowest` is the rank of `best` by `loading_rank`.
local function choose_with_adapter(request)
  local best, reserved, lowest
  for _, most in ipairs({MAX_CANDIDATES, places.MAX_ADAPTER_CANDIDATES}) do
    local first -- with most available blocks of those with room
    for _, executor_id in ipairs(lowest == 0 and {} or places.roomiest(most)) do
      local executor = load_executor(executor_id)
      local blocks = places.room_for(request, executor)
      first = first or blocks and executor
      local rank = blocks and not fullness.is_much_fuller(executor, first)
        and adapters.loading_rank(executor, request.adapter)
      if rank and rank < (lowest or math.huge) then
        best, reserved, lowest = executor_id, blocks, rank
      end
    end
  end
  if not best then
    return nil
  end
  return cheapest(request, best, reserved)
end

local function choose_open(request)
  if request.adapter ~= '' then
    return choose_with_adapter(request)
  end
  local most = request.failures > 0 and places.MAX_SUSPECT_CANDIDATES or MAX_CANDIDATES
  for count = 1, most, most - 1 do -- the first is usually enough
    for _, executor_id in ipairs(places.roomiest(count)) do
      local blocks = places.room_for(request, load_executor(executor_id))
      if blocks then
        return cheapest(request, executor_id, blocks)
      end
    end
    if request.sequences == 1 and request.failures == 0 and request.placement_blocks == request.blocks
      and not state.overcommits then
      return nil
    end
  end
  return nil
end

-- The first executor with room that is claimed for the request itself, or else for a lower class.
local function choose_claimed(id, request, for_itself)
  for _, claim in ipairs(claims) do
    if for_itself and claim.id == id or not for_itself and request.class < claim.class then
      local executor = load_executor(claim.executor_id)
      local blocks = places.takes_work(executor) and places.room_for(request, executor)
      if blocks then
        return claim.executor_id, blocks, 0
      end
    end
  end
  return nil
end

-- The executor for the request now, the blocks to reserve there, and the tokens of its prompt that are cached there;
-- nil if there is none. Ties by id.
function places.choose(id, request)
  if #claims == 0 then
    return choose_open(request)
  end
  local executor_id, blocks, cached = choose_claimed(id, request, true)
  if not executor_id then
    executor_id, blocks, cached = choose_open(request)
  end
  if not executor_id then
    executor_id, blocks, cached = choose_claimed(id, request, false)
  end
  return executor_id, blocks, cached
end

-- Whether the executor, if empty, would hold this much.
function places.would_hold(executor, request)
  return executor and fits.would_hold(executor, request)
    and (request.adapter == '' or adapters.serves(executor, request.adapter))
end

-- Whether the executor accepts work and would hold this much.
function places.could_hold(executor, request)
  return places.takes_work(executor) and places.would_hold(executor, request)
end

-- Whether some executor that serves its adapter, if empty, would hold this much. Silent ones count until their lease
-- lapses: they may return.
function places.fits_somewhere(request)
  if kept.fitting and places.would_hold(executors[kept.fitting], request) then -- the one that was found last
    return true
  end
  for _, count in ipairs({1, request.adapter == '' and 64 or places.MAX_SERVING}) do -- the first is usually enough
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', SIZES, request.blocks, '+inf', 'LIMIT', '0', count)) do
      if places.would_hold(load_executor(id), request) then
        kept.fitting = id
        return true
      end
    end
  end
  return false
end

-- Claims for the request the executor that is closest to having room for it. Returns false if there is none.
function places.claim_executor(id, request)
  if #claims >= MAX_CLAIMS then
    return false
  end
  local best, most = nil, nil
  local count = request.adapter == '' and 64 or places.MAX_SERVING
  for _, executor_id in ipairs(redis.call('ZRANGEBYSCORE', SIZES, request.blocks, '+inf', 'LIMIT', 0, count)) do
    local executor = load_executor(executor_id)
    if places.could_hold(executor, request) and executor.claim == ''
      and (not most or available_blocks(executor) > most) then
      best, most = executor_id, available_blocks(executor)
    end
  end
  if not best then
    return false
  end
  local executor = load_executor(best)
  executor.claim, request.claim = id, best
  save_executor(best, executor)
  claims[#claims + 1] = {id = id, executor_id = best, class = request.class}
  save_claims()
  return true
end
