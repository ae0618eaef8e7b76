-- Library: how the scripts are functions of one library, and what a call begins with.
--
-- A call runs in three steps: what the files have set by `at_begin`, then the script, then `finish` or `answer`
-- (reply.lua). Tables at the top level of a file stay between calls, so those that are of one call are emptied at its
-- beginning. A router's call that fails half-way has not increased the version in the pool's state, from which the next
-- call sees whether what is kept equals what Redis has (records.lua). So it is increased here.
local last_call_ms -- of any function of the library

-- Returns the milliseconds since a function of the library was last called. The time of that call is unknown after a
-- restart or a failover; then it counts from the first query.
redis.register_function{function_name = 'inflight_idle_ms_' .. DIGEST, flags = {'no-writes'}, callback = function()
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  last_call_ms = last_call_ms or now
  return now - last_call_ms
end}

-- Drops its keys. A router's user in Redis may call PEXPIRE, but not DEL.
redis.register_function('inflight_forget_' .. DIGEST, function(keys)
  for _, key in ipairs(keys) do
    redis.call('PEXPIRE', key, 0)
  end
end)

-- Lua reads a local variable faster than a global one. While the library is loaded there are no globals but `redis`, so
-- the first call sets these.
local function globals()
  return redis, next, pairs, ipairs, unpack, tonumber, pcall, error, math, string, struct, cmsgpack
end

local register_function = redis.register_function
local redis, next, pairs, ipairs, unpack, tonumber, pcall, error, math, string, struct, cmsgpack

local KEYS, ARGV -- of the call
local NOW -- milliseconds of the ledger's clock (records.lua)
local beginnings = {}

local function at_begin(set)
  beginnings[#beginnings + 1] = set
end

-- Returns an empty table for the next call: the one of the call before, if that was small, because creating tables is
-- most of the cost of a call. Most tables are empty already, so `next` is asked first.
local function cleared(used)
  local count = 0
  for key in next, used do
    if count == 32 then
      return {}
    end
    used[key], count = nil, count + 1
  end
  return used
end

local function called(run)
  for i = 1, #beginnings do
    beginnings[i]()
  end
  last_call_ms = NOW
  return run()
end

local function use_arguments(keys, args)
  KEYS, ARGV = keys, args
  if not next then
    redis, next, pairs, ipairs, unpack, tonumber, pcall, error, math, string, struct, cmsgpack = globals()
  end
end

-- Registers a script that does not use the pool's keys: it has keys of its own, and its own form of reply.
local function outside_script(name, run, flags)
  local function call(keys, args)
    use_arguments(keys, args)
    return run()
  end
  register_function{function_name = 'inflight_' .. name .. '_' .. DIGEST, flags = flags, callback = call}
end

-- Registers a function of the library: a script.
local function script(name, run, flags)
  local function call(keys, args)
    use_arguments(keys, args)
    local done, result = pcall(called, run)
    if done then
      return result
    end
    local state = keys[17]
    local text = redis.pcall('GET', state)
    if type(text) == 'string' and #text >= 8 then -- the version is the last field
      redis.pcall('SETRANGE', state, #text - 8, struct.pack('<d', struct.unpack('<d', text, #text - 7) + 1))
    end
    error(result, 0)
  end
  register_function{function_name = 'inflight_' .. name .. '_' .. DIGEST, flags = flags, callback = call}
end
