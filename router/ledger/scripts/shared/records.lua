-- Records: the pool's keys and their contents.
--
-- KEYS     the pool's keys, in the order of keys.py; behind them the mailboxes that the caller knows.
-- ARGV     [1] the calling router; the rest is the script's own.
-- returns  {outcome, events, missing, more, registered, now}, the same for every script:
--            outcome     the script's own answer; {'AGAIN'}: call it again with the same arguments
--            events      events of the caller's own requests, each a flat list of fields and values
--            missing     live routers whose mailbox is needed and was not passed; their part was left undone
--            more        1 where `board` stopped at its bound
--            registered  1 if the pool did not know the caller: its waiting requests may be lost
--            now         milliseconds of the ledger's clock
--
-- Records are packed numbers and strings at a tenth of the cost of JSON. schema.py lists their fields and generates
-- `pack_…` and `unpack_…`. Requests, executors, tenants and the pool's own state are unpacked once in a call, changed in
-- place, and written by `finish`. A read of a key in between flushes the key's writes, or regards the changes of the
-- call. "No limit", "no deadline", "not yet" is infinity, so that times are compared without asking whether there is
-- one; '' is no name.

local EXECUTORS, ROOM, SIZES, REPORTS, REQUESTS, PLACEMENTS, LOST, ENDED, ROUTERS, ATTENDED, STATE, TENANTS, AGEING
local LENGTHS, PREEMPTIBLE, PREFIXES, OLD_PREFIXES, ENDINGS, ADAPTERS, CHECKPOINTS -- the pool's keys
local WAITING = 5 -- KEYS[WAITING + class]
local ACTIVE = 8 -- KEYS[ACTIVE + class]
local NUM_POOL_KEYS = 26

local NUM_CLASSES = 3
local SILENT_MS = 2000        -- an executor that reported no later gets no new work
local LEASE_MS = 5000         -- an executor or router silent for longer is gone
local RELAY_MS = 600          -- routers hold a report back for up to half a second
local AUDIT_GRACE_MS = 2000   -- how long a placement may take to show up in its executor's reports
local PATIENCE_MS = 60000     -- a request that comes this much later never overtakes by its deadline
local MAX_HEADS = 16          -- waiting requests that one call looks at
local MAX_BOARDED = 8         -- of them those that it places or drops: about 0.6 ms of Redis
local MAX_CANDIDATES = 4      -- executors examined for a seat at a time
local MAX_WRITE = 512         -- words of a command that is written at the end of a call
local MAILBOX_ENTRIES = 10000 -- about how many unread entries a mailbox keeps
local MAILBOX_MS = 600000     -- an unread mailbox is deleted after about this long

local CALLER

local events, missing
local more, registered

-- What functions keep between calls, by pool: the records that calls have read, as Redis has them, and the heads of the
-- queues. A call uses them without reading if nothing else has written since: `state` has the text of the last call of this
-- library, and every call that writes raises its version. Nor may a key be gone. A call takes everything out of here and
-- puts it back at its end: what a failed call has changed is lost.
local kept_pools = {}
local MAX_KEPT = 8192 -- records of a pool
local kept

local function keep() -- without a state there is no version: the first write may fail half-way
  kept_pools[STATE] = kept.text and kept.num <= MAX_KEPT and kept or nil
end

-- The pool's own state: counters, sums over waiting requests, measurements (0: none yet), options of the newest submit.
local state
local NOW_TEXT -- a number argument of a command costs ten times a string

-- Claims: executors kept for requests that were bypassed too often, a list of {request id, class, executor_id}.
local claims

local function save_claims()
  state.claims = #claims > 0 and cmsgpack.pack(claims) or ''
end

-- Writes of this call that are not made yet, by key: one command with many members costs less than many commands.
-- `length` of a command counts its words; the entries after them are from an earlier call.
local writes = {}
local written_keys = {}

local function flush_writes(key)
  local write = writes[key]
  if write and write.length > 0 then
    local length = write.length
    write.length = 0
    redis.call(unpack(write, 1, length))
  end
end

-- Adds one or two words to a command on the key. What waits for the key by another command is written first.
local function write_later(command, key, first, second)
  local write = writes[key]
  if not write then
    write = {length = 0}
    writes[key] = write
  end
  local length = write.length
  if length > 0 and (write[1] ~= command or length > MAX_WRITE) then
    flush_writes(key)
    length = 0
  end
  if length == 0 then
    write[1], write[2], length = command, key, 2
    written_keys[#written_keys + 1] = key
  end
  write[length + 1] = first
  if second then
    length = length + 1
    write[length + 1] = second
  end
  write.length = length + 1
end

local executors -- those that were read, or false
local dirty_executors = {}

local function load_executor(id)
  local executor = executors[id]
  if executor == nil then
    local text = redis.call('HGET', EXECUTORS, id)
    executor = text and unpack_executor(text)
    if executor then
      executor.id = id
    end
    executors[id], kept.num = executor, kept.num + 1
  end
  return executor
end

local function available_blocks(executor)
  return executor.budget_blocks - executor.reserved_blocks
end

-- Whether the executor is in `room`. A silent one leaves it only when `choose` meets it there.
local function has_room(executor)
  return executor.accepting and not executor.suspended and executor.claim == ''
    and executor.reserved_sequences < executor.budget_sequences
end

local silent_executors = {} -- those that left `room` in this call
local roomiest_found = {} -- the roomiest executor, as long as no other is saved: see places.lua

local function save_executor(id, executor)
  executors[id], dirty_executors[id], silent_executors[id] = executor, executor, nil
  roomiest_found[1] = nil
end

-- Writes the changed executors and their room.
local function flush_executors()
  for id, executor in pairs(dirty_executors) do
    write_later('HSET', EXECUTORS, id, pack_executor(executor))
    if has_room(executor) and not silent_executors[id] then
      write_later('ZADD', ROOM, string.format('%d', -available_blocks(executor)), id)
      executor.is_out, kept.is_room_empty = false, false
    end
  end
  for id, executor in pairs(dirty_executors) do
    if not has_room(executor) and not executor.is_out then -- as it stays where ends are followed by placements
      write_later('ZREM', ROOM, id)
      executor.is_out = true
    end
  end
end

local known_tenants
local dirty_tenants, unlisted_tenants = {}, {}
local new_tenants = {} -- not in Redis when they were read

local function load_tenant(name)
  local tenant = known_tenants[name]
  if tenant == nil then
    local text = redis.call('HGET', TENANTS, name)
    tenant = text and unpack_tenant(text) or {
      counter = 0, weight = 1, waiting_by_class = {0, 0, 0}, listed = {math.huge, math.huge, math.huge}, active = false,
      waiting = 0, tokens = {0, 0, 0}, bytes = 0, running = 0, max_running = math.huge, output_share = state.output_share,
      correction = state.correction, request_ms = 0, token_ms = 0, ms_per_token = 0, used_ms = NOW, heads = false,
    }
    known_tenants[name], kept.num = tenant, kept.num + 1
    if not text then
      new_tenants[name] = tenant
    end
  end
  return tenant
end

local function save_tenant(name, tenant)
  tenant.used_ms, dirty_tenants[name], unlisted_tenants[name] = NOW, tenant, tenant
end

-- Writes the changed tenants.
local function flush_tenants()
  for name, tenant in pairs(dirty_tenants) do
    write_later('HSET', TENANTS, name, pack_tenant(tenant))
    new_tenants[name] = nil
  end
  for name in pairs(new_tenants) do
    known_tenants[name] = nil
  end
end

local requests, dirty_requests = {}, {} -- false for one that is not there (any more)
local examined = {} -- waiting requests that did not fit in this call: the next ones examine them, too

local function load_request(id)
  local request = requests[id]
  if request == nil then
    request = kept.waiting[id]
    if not request then
      local text = redis.call('HGET', REQUESTS, id)
      request = text and unpack_request(text)
    end
    requests[id] = request
  end
  return request
end

-- The tokens of prompt and output that its next placement reserves: all, unless another placement has to follow.
local function reserved_tokens(request)
  local tokens = request.prompt + request.max
  return request.placement_blocks >= request.blocks and tokens
    or math.min(tokens, request.placement_blocks * request.block_size)
end

local function save_request(id, request)
  requests[id], dirty_requests[id] = request, request
end

local function delete_request(id)
  requests[id], dirty_requests[id] = false, false
end

local function flush_requests()
  local waiting = kept.waiting
  for id in pairs(examined) do
    local request = requests[id]
    if request and request.state == 'WAITING' then
      kept.num = kept.num + (waiting[id] and 0 or 1)
      waiting[id] = request
    end
  end
  for id, request in pairs(dirty_requests) do
    if waiting[id] and (not request or request.state ~= 'WAITING') then
      waiting[id], kept.num = nil, kept.num - 1
    end
    if not request then
      write_later('HDEL', REQUESTS, id)
    end
  end
  for id, request in pairs(dirty_requests) do
    if request then
      write_later('HSET', REQUESTS, id, pack_request(request))
    end
  end
end

-- Prefixes whose executor this call has recorded: by hash, and as words of the command that writes them. The words behind
-- `num_remembered_words` are from an earlier call.
local remembered, remembered_words, num_remembered_words = {}, {}, 0
local MAX_PREFIXES = 100000 -- remembered, in two generations: the newest and the previous

local function flush_prefixes()
  if num_remembered_words == 0 then
    return
  end
  state.num_prefixes = state.num_prefixes + redis.call('HSET', PREFIXES, unpack(remembered_words, 1, num_remembered_words))
  if state.num_prefixes >= MAX_PREFIXES then
    redis.call('RENAME', PREFIXES, OLD_PREFIXES)
    state.num_prefixes, state.has_old_prefixes = 0, true
  end
end

local function use_keys()
  local _
  EXECUTORS, ROOM, SIZES, REPORTS, REQUESTS, _, _, _, _, _, _, PLACEMENTS, LOST, ENDED, ROUTERS, ATTENDED, STATE, TENANTS,
    AGEING, LENGTHS, PREEMPTIBLE, PREFIXES, OLD_PREFIXES, ENDINGS, ADAPTERS, CHECKPOINTS = unpack(KEYS, 1, NUM_POOL_KEYS)
end

-- Takes out what is kept of the pool, if it equals what Redis has.
local function use_kept()
  local text = redis.call('GET', STATE)
  kept = kept_pools[STATE]
  kept_pools[STATE] = nil
  if not kept or kept.text ~= text or next(kept.executors) and redis.call('HLEN', EXECUTORS) == 0
    or next(kept.waiting) and redis.call('HLEN', REQUESTS) == 0 then
    kept = {
      text = text, num = 0, -- of the records
      executors = {}, tenants = {}, histograms = {}, waiting = {}, -- of waiting requests those that did not fit last
      living = {}, leases = {}, -- whether a router has a lease, and until when, of callers
      active = {}, num_active = {}, -- by class, the first active tenants (tenants.lua), and how many there are
      mailed = {}, -- by mailbox, when its time to live was set last
      is_room_empty = false, -- the key `room`
    }
  end
  executors, known_tenants = kept.executors, kept.tenants
end

local function load_state()
  state = kept.state or kept.text and unpack_state(kept.text) or {
    arrivals = 0, floor = 0, waiting = 0, waiting_by_class = {0, 0, 0}, tokens = {0, 0, 0}, bytes = 0, max_bypass = 16,
    age_ms = 30000, preempts = false, overcommits = false, num_estimates = 0, error = 0, correction = 1,
    moving_ms = 0, moved_tokens = 0, moved_at = 0, prefill_speed = 0, output_speed = 0, standby = 0, step_ms = 0,
    next_age_ms = math.huge, num_prefixes = 0, output_share = 1, num_outputs = 0, has_old_prefixes = false, unboarded = false, remember_ms = 75000, tenant_cursor = '0',
    sweep_cursor = '0', claims = '', now_ms = 0, ahead_ms = 0, tolerated_ttft_ms = 2000, version = 0,
  }
  kept.state = nil -- it may be changed and not saved
  claims = state.claims ~= '' and cmsgpack.unpack(state.claims) or {}
end

-- The ledger's clock. It never goes back: when Redis' clock is set back, it runs on from the latest time that a call
-- has seen, and stays so much ahead of Redis' clock. `finish` saves both, so a call that changes nothing else writes
-- them, too, unless it only reads.
local function read_clock()
  NOW = now_ms() + state.ahead_ms
  if NOW < state.now_ms then
    state.ahead_ms = state.ahead_ms + state.now_ms - NOW
    NOW = state.now_ms
  end
  state.now_ms, NOW_TEXT = NOW, string.format('%d', NOW)
end

at_begin(function()
  CALLER, events, missing, more, registered = ARGV[1], {}, {}, 0, 0
  if STATE ~= KEYS[17] then
    use_keys()
  end
  use_kept()
  load_state()
  read_clock()
  if next(written_keys) then -- the call before failed, or only read
    for _, key in ipairs(written_keys) do
      writes[key].length = 0
    end
    written_keys = {}
  end
  if next(dirty_executors) then dirty_executors = cleared(dirty_executors) end
  if next(silent_executors) then silent_executors = cleared(silent_executors) end
  if next(roomiest_found) then roomiest_found = cleared(roomiest_found) end
  if next(dirty_tenants) then dirty_tenants = cleared(dirty_tenants) end
  if next(unlisted_tenants) then unlisted_tenants = cleared(unlisted_tenants) end
  if next(new_tenants) then new_tenants = cleared(new_tenants) end
  if next(requests) then requests = cleared(requests) end
  if next(dirty_requests) then dirty_requests = cleared(dirty_requests) end
  if next(examined) then examined = cleared(examined) end
  if next(remembered) then remembered = cleared(remembered) end
  num_remembered_words = 0
end)
