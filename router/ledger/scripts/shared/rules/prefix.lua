-- Prefix: a rule that prefers the executor where a prompt costs least to compute: one that holds a prefix of it. `prefixes`
-- has of each prefix the executors that were given it.
--
-- An executor's `prefilled_ms` is when it will have computed the prompts that it was given, at the speed of its last
-- report: each placement adds those tokens of its prompt that are not cached there. It takes no notice of ends.
--
-- parameters  state.tolerated_ttft_ms: how long the prompts in front may take on the holder of a prefix
local MAX_HOLDERS = 4 -- remembered for a prefix that several prompts share
-- Of a prefix: the executor, the tokens of the prompt, and with recurrent layers until when its checkpoints count as kept
-- (checkpoints.lua); a semicolon between two.
prefix.HOLDER = '([^ ;]+) (%d+) ?(%d*)'
local hashes_of, hashes -- of the last examined request: the one that will be placed
local names_states -- whether they are those at whose ends recurrent state may be kept
local holders_of, holders -- and who holds them

at_begin(function()
  hashes_of, hashes, holders_of, holders = nil, nil, nil, nil
end)

function prefix.split_prefixes(text)
  if text ~= hashes_of then
    hashes_of, hashes, names_states = text, {}, text:find(':', 1, true) ~= nil
    for hash in text:gmatch('%S+') do
      hashes[#hashes + 1] = hash
    end
  end
  return hashes
end

-- Whether the prefixes that were split last are those of a model with recurrent layers.
function prefix.names_states()
  return names_states
end

-- The milliseconds until the executor has computed the prompts that it was given.
function prefix.prefill_wait(executor)
  return math.max(0, executor.prefilled_ms - NOW)
end

-- The tokens of the request's `i`-th named prefix: the powers of two of blocks, and all full blocks, unless the names say
-- it (ids.py).
local function prefix_tokens(request, names, i)
  if names_states then
    return tonumber(names[i]:match(':(%d+)$'))
  end
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
local function cached_tokens(request, names, i, length)
  local tokens = prefix_tokens(request, names, i)
  local next_tokens = i < #names and prefix_tokens(request, names, i + 1) or tokens
  return length < next_tokens and math.max(tokens, length) or tokens
end

-- The tokens that need not be computed on an executor that was given a prompt of `length` tokens with the `i`-th name; nil
-- if that has recurrent layers and keeps no state there.
function prefix.usable_tokens(request, names, i, executor_id, length, due_ms)
  if not names_states then
    return cached_tokens(request, names, i, tonumber(length))
  end
  return checkpoints.has(executor_id, names[i], tonumber(due_ms) or 0) and prefix_tokens(request, names, i) or nil
end

-- How many milliseconds the prompts in front of the request may take on the holder of a prefix. No limit where they take
-- longer on `best`, too: where all executors are that busy, prompts that leave their prefixes make them busier.
function prefix.tolerated_wait(request, best)
  local until_deadline = request.output == 0 and request.deadline_ms - NOW or math.huge
  local tolerated_ms = math.min(state.tolerated_ttft_ms, until_deadline)
  return prefix.prefill_wait(best) > tolerated_ms and math.huge or tolerated_ms
end

-- The executors that were given each prefix of the request, the last one first, with the tokens of the prompt that had
-- it; false where none is known.
function prefix.load_holders(request)
  local names = prefix.split_prefixes(request.prefixes)
  if holders_of ~= request.prefixes then
    holders_of, holders = request.prefixes, redis.call('HMGET', PREFIXES, unpack(names))
    local old = state.has_old_prefixes and redis.call('HMGET', OLD_PREFIXES, unpack(names))
    if old or next(remembered) then
      for i = 1, #names do
        holders[i] = remembered[names[i]] or holders[i] or old and old[i]
      end
    end
  end
  return holders
end

-- Whether the newest prompt with the request's longest known prefix goes on otherwise: then several prompts share it.
-- Else the request continues that prompt, as the next turn of a chat does.
local function is_shared(request, names, found)
  for i = #names, 1, -1 do
    if found[i] then
      local length = tonumber(found[i]:match(' (%d+)'))
      return cached_tokens(request, names, i, length) < length
    end
  end
  return false
end

-- Records that the executor will hold these prefixes. Of a prefix that several prompts share the executors before it are
-- kept, too. A chat has one executor: else it would go back and forth between two, and take up the caches of both.
function prefix.remember_prefixes(request, executor_id)
  if request.prefixes == '' then
    return
  end
  local names, found = prefix.split_prefixes(request.prefixes), prefix.load_holders(request)
  local are_shared = is_shared(request, names, found)
  local own = string.format('%s %d', executor_id, request.prompt)
  if names_states then
    own = string.format('%s %d', own, checkpoints.due_ms(load_executor(executor_id)))
  end
  local value_of, value -- most prefixes have the same executors
  local last = num_remembered_words
  for i = 1, #names do
    local name, before = names[i], found[i]
    if before ~= value_of then
      value_of, value = before, own
      if before and (are_shared or before:find(';', 1, true)) then
        local count = 1
        for id, length, due_ms in before:gmatch(prefix.HOLDER) do
          if id ~= executor_id and count < MAX_HOLDERS then
            value, count = value .. ';' .. id .. ' ' .. length .. (due_ms ~= '' and ' ' .. due_ms or ''), count + 1
          end
        end
      end
    end
    remembered[name], remembered_words[last + 1], remembered_words[last + 2] = value, name, value
    last = last + 2
  end
  num_remembered_words = last
  holders_of = nil -- `remembered` has changed
end

-- Returns the tokens of the prompt that the executor has to compute.
function prefix.cost(request, _, cached)
  return math.max(0, request.prompt + request.output - cached)
end
