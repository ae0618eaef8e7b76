-- Places: the choice of the executor for a request.
--
-- `room` has the executors with a free sequence, ordered by available blocks, without the claimed ones. An executor is
-- claimed for a request that was bypassed too often: it serves that request first, and higher classes if no other
-- executor has room. Of the rest the one with most available blocks is taken. A prompt with named prefixes goes where it
-- costs least, in time to compute what is in front of it and what is not cached and in a price for fullness, among the
-- executors that hold a prefix and the one with most available blocks, but not where the prompts in front take longer than
-- the tolerated TTFT, unless they do so on both.
--
-- An executor's `prefilled_ms` is when it will have computed the prompts that it was given, at the speed of its last
-- report: each placement adds those tokens of its prompt that are not cached there. It takes no notice of ends.
--
-- A request with an adapter goes to an executor where the adapter is resident, or else one with an empty slot, if that
-- is not much fuller than the one with most available blocks.
-- How much fuller, as a share of its blocks or sequences, an executor with the adapter may be, or the holder of a prefix
-- whose speed is not known.
local MAX_IMBALANCE = 0.25
local MAX_CLAIMS = 8
places.MAX_SUSPECT_CANDIDATES = 64 -- executors examined for one without another suspect
places.MAX_ADAPTER_CANDIDATES = 64 -- executors examined for one with a slot for an adapter
places.MAX_SERVING = 1024 -- executors examined for one that serves an adapter

function places.takes_work(executor)
  return executor and executor.accepting and not executor.suspended and NOW - executor.last_report_ms <= SILENT_MS
end

-- Whether the executor already runs a suspect and the request is one, too: one of them could crash the other.
function places.are_both_suspect(request, executor)
  return request.strikes > 0 and executor.has_suspect
end

-- The blocks to reserve for the request, if it fits whatever its adapter is.
function places.room_without_adapter(request, executor)
  if places.are_both_suspect(request, executor) then
    return nil
  end
  if executor.budget_sequences - executor.reserved_sequences < request.sequences then
    return nil
  end
  if available_blocks(executor) < lengths.least_blocks(request, executor) then
    return nil
  end
  local blocks = lengths.needed_blocks(request, executor)
  return available_blocks(executor) >= blocks and blocks or nil
end

-- The blocks to reserve for the request, if there is room for it.
function places.room_for(request, executor)
  if request.adapter ~= '' and not adapters.may_pin(executor, request.adapter, adapters.pins_of(executor)) then
    return nil
  end
  return places.room_without_adapter(request, executor)
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
local hashes_of, hashes -- of the last examined request: the one that will be placed
local holders_of, holders -- and who holds them

at_begin(function()
  room, num_read = cleared(room), 0
  hashes_of, hashes, holders_of, holders = nil, nil, nil, nil
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

function places.load_of(executor)
  return math.max(
    executor.reserved_blocks / math.max(1, executor.budget_blocks),
    executor.reserved_sequences / math.max(1, executor.budget_sequences))
end

local MAX_HOLDERS = 4 -- remembered for a prefix that several prompts share
places.HOLDER = '([^ ;]+) (%d+)' -- of a prefix: the executor, and the tokens of the prompt; a semicolon between two
-- The price of a full executor, as a multiple of the time to compute all of the prompt; a half full one costs half. The more
-- there is on an executor, the slower are its steps and the sooner it evicts a prefix that is to be used again.
places.FULLNESS_WEIGHT = 2

function places.split_prefixes(prefixes)
  if prefixes ~= hashes_of then
    hashes_of, hashes = prefixes, {}
    for hash in prefixes:gmatch('%S+') do
      hashes[#hashes + 1] = hash
    end
  end
  return hashes
end

-- The milliseconds until the executor has computed the prompts that it was given.
function places.prefill_wait(executor)
  return math.max(0, executor.prefilled_ms - NOW)
end

-- The tokens of the request's `i`-th named prefix: the powers of two of blocks, and all full blocks (ids.py).
local function prefix_tokens(request, names, i)
  local blocks = math.floor(request.prompt / request.block_size)
  local _, exponent = math.frexp(blocks)
  local power, last = 2 ^ (exponent - 1), #names
  if i < last and power < blocks then
    last = last - 1
  end
  return request.block_size * (i == #names and blocks or math.floor(power / 2 ^ (last - i)))
end

-- The tokens that are cached where a prompt of `length` tokens with the `i`-th name was placed, and none with the next
-- name. All of that prompt, if it ends before the next name would begin to differ.
function places.cached_tokens(request, names, i, length)
  local tokens = prefix_tokens(request, names, i)
  local next_tokens = i < #names and prefix_tokens(request, names, i + 1) or tokens
  return length < next_tokens and math.max(tokens, length) or tokens
end

-- How many milliseconds the prompts in front of the request may take on the holder of a prefix. No limit where they take
-- longer on `best`, too: where all executors are that busy, prompts that leave their prefixes make them busier.
function places.tolerated_wait(request, best)
  local until_deadline = request.output == 0 and request.deadline_ms - NOW or math.huge
  local tolerated_ms = math.min(state.tolerated_ttft_ms, until_deadline)
  return places.prefill_wait(best) > tolerated_ms and math.huge or tolerated_ms
end

-- The executors that were given each prefix of the request, the last one first, with the tokens of the prompt that had
-- it; false where none is known.
function places.load_holders(request)
  local names = places.split_prefixes(request.prefixes)
  if holders_of ~= request.prefixes then
    holders_of, holders = request.prefixes, redis.call('HMGET', PREFIXES, unpack(names))
    local old = state.has_old_prefixes and redis.call('HMGET', OLD_PREFIXES, unpack(names)) or {}
    for i = 1, #names do
      holders[i] = holders[i] or old[i]
    end
  end
  for i = 1, #names do
    holders[i] = remembered[names[i]] or holders[i]
  end
  return holders
end

-- The executor on which the prompt costs least, the blocks to reserve there, and the tokens of the prompt that are
-- cached there: one that holds a prefix, or `best`, which has most available blocks. A holder counts unless the prompts in
-- front take longer there than tolerated, and not on `best`. Where no speed is known nothing costs, so the holder of the
-- longest prefix is taken unless it is much fuller, and an executor that has just started is measured soon.
local function cheapest(request, best, best_blocks)
  if request.prefixes == '' then
    return best, best_blocks, 0
  end
  local names, tolerated_ms = places.split_prefixes(request.prefixes), places.tolerated_wait(request, load_executor(best))
  local tokens = request.prompt + request.output
  local seen, chosen, reserved, most_cached, least_ms = {}, nil, nil, 0, math.huge
  local function consider(id, executor, cached)
    if not places.takes_work(executor) or executor.claim ~= '' then
      return
    end
    local wait_ms, speed, load = places.prefill_wait(executor), executor.prefill_speed, places.load_of(executor)
    if speed == 0 and load > places.load_of(load_executor(best)) + MAX_IMBALANCE then
      return
    end
    local blocks = id == best and best_blocks or places.room_for(request, executor)
    if not blocks or id ~= best and cached > 0 and wait_ms > tolerated_ms then
      return
    end
    local missing = math.max(0, tokens - cached)
    local ms = speed > 0 and wait_ms + (missing + places.FULLNESS_WEIGHT * load * tokens) / speed or 0
    if ms < least_ms then
      chosen, reserved, most_cached, least_ms = id, blocks, cached, ms
    end
  end
  local found = places.load_holders(request)
  for i = #names, 1, -1 do
    if found[i] and found[i] ~= found[i + 1] then
      for id, length in found[i]:gmatch(places.HOLDER) do
        if not seen[id] then
          seen[id] = true
          local executor = load_executor(id)
          -- Looked at first: while requests wait, most holders have no free sequence.
          if executor and executor.budget_sequences - executor.reserved_sequences >= request.sequences then
            consider(id, executor, places.cached_tokens(request, names, i, tonumber(length)))
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

-- Whether the newest prompt with the request's longest known prefix goes on otherwise: then several prompts share it.
-- Else the request continues that prompt, as the next turn of a chat does.
local function is_shared(request, names, found)
  for i = #names, 1, -1 do
    if found[i] then
      local length = tonumber(found[i]:match(' (%d+)'))
      return places.cached_tokens(request, names, i, length) < length
    end
  end
  return false
end

-- Records that the executor will hold these prefixes. Of a prefix that several prompts share the executors before it are
-- kept, too. A chat has one executor: else it would go back and forth between two, and take up the caches of both.
function places.remember_prefixes(request, executor_id)
  if request.prefixes == '' then
    return
  end
  local names, found = places.split_prefixes(request.prefixes), places.load_holders(request)
  local are_shared = is_shared(request, names, found)
  local own = string.format('%s %d', executor_id, request.prompt)
  local merged_of, merged -- most prefixes have the same executors
  for i = 1, #names do
    local value = own
    if found[i] and (are_shared or found[i]:find(';', 1, true)) then
      if found[i] ~= merged_of then
        merged_of, merged = found[i], own
        local count = 1
        for id, length in found[i]:gmatch(places.HOLDER) do
          if id ~= executor_id and count < MAX_HOLDERS then
            merged, count = merged .. ';' .. id .. ' ' .. length, count + 1
          end
        end
      end
      value = merged
    end
    local last = #remembered_words
    remembered[names[i]], remembered_words[last + 1], remembered_words[last + 2] = value, names[i], value
  end
end

-- As `choose_open`, for a request with an adapter. `lowest` is the rank of `best` by `loading_rank`.
local function choose_with_adapter(request)
  local best, reserved, lowest
  for _, most in ipairs({MAX_CANDIDATES, places.MAX_ADAPTER_CANDIDATES}) do
    local roomiest_load
    for _, executor_id in ipairs(lowest == 0 and {} or places.roomiest(most)) do
      local executor = load_executor(executor_id)
      local blocks = places.room_for(request, executor)
      roomiest_load = roomiest_load or blocks and places.load_of(executor)
      local rank = blocks and places.load_of(executor) <= roomiest_load + MAX_IMBALANCE and adapters.loading_rank(executor, request.adapter)
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
  local most = request.strikes > 0 and places.MAX_SUSPECT_CANDIDATES or MAX_CANDIDATES
  for count = 1, most, most - 1 do -- the first is usually enough
    for _, executor_id in ipairs(places.roomiest(count)) do
      local blocks = places.room_for(request, load_executor(executor_id))
      if blocks then
        return cheapest(request, executor_id, blocks)
      end
    end
    if request.sequences == 1 and request.strikes == 0 and request.placement_blocks == request.blocks
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
  return executor and executor.total_blocks >= request.blocks and executor.budget_sequences >= request.sequences
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
