-- Records: the pool's keys, and what is kept in them. Prepended to every script, behind clock.lua.
--
-- KEYS     the pool's keys, in the order of keys.py; behind them the mailboxes that the caller knows.
-- ARGV     [1] the calling router; the rest is the script's own.
-- returns  {outcome, events, missing, more, registered}, the same for every script:
--            outcome     the script's own answer; {'AGAIN'}: call it again with the same arguments
--            events      what the caller must know of its own requests, each a flat list of fields and values
--            missing     live routers whose mailbox is needed and was not passed; what concerns them was left undone
--            more        1 where `board` stopped at its bound
--            registered  1 where the pool did not know the caller: what waited in its name may be gone
--
-- Records are tables packed by cmsgpack, a third of what JSON costs. Executors, tenants and the pool's own state are
-- unpacked once in a call, changed in place, and written by `flush`; `choose` flushes executors, for it reads `room`.
-- "No limit" is infinity, so that limits are compared without asking whether there is one.

local EXECUTORS, ROOM, SIZES, REPORTS, REQUESTS = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local WAITING = {KEYS[6], KEYS[7], KEYS[8]}
local ACTIVE = {KEYS[9], KEYS[10], KEYS[11]}
local WAITING_BY_OWNER, PLACEMENTS, LOST, ENDED = KEYS[12], KEYS[13], KEYS[14], KEYS[15]
local ROUTERS, ATTENDED, STATE, TENANTS = KEYS[16], KEYS[17], KEYS[18], KEYS[19]
local AGEING, LENGTHS, PREEMPTIBLE = KEYS[20], KEYS[21], KEYS[22]
local PREFIXES, OLD_PREFIXES = KEYS[23], KEYS[24]
local NUM_POOL_KEYS = 24

local NUM_CLASSES = 3
local SILENT_MS = 2000        -- an executor that reported no later gets no new work
local LEASE_MS = 5000         -- an executor or router silent for longer is gone
local AUDIT_GRACE_MS = 2000   -- how long a placement may take to show up in its executor's reports
local TOMBSTONE_MS = 60000    -- how long an ended id is remembered; outlives any report in flight
local PATIENCE_MS = 60000     -- in its tenant's line nobody stands behind who comes so much later, whatever the deadlines
local MAX_HEADS = 32          -- requests that one call deals with
local MAX_CANDIDATES = 4      -- executors looked at for a seat at a time
local MAILBOX_ENTRIES = 10000 -- about how many unread entries a mailbox keeps
local MAILBOX_MS = 600000     -- an unread mailbox is deleted after this long

local NOW = now_ms()
local CALLER = ARGV[1]
local call, pack, unpack_record, huge = redis.call, cmsgpack.pack, cmsgpack.unpack, math.huge

local events, missing, more, registered = {}, {}, 0, 0

-- The pool's own state: counters, what waits in sum, what is measured, and the options of the newest submit.
local state
local text_of_state = call('GET', STATE)
if text_of_state then
  state = unpack_record(text_of_state)
else
  state = {
    arrivals = 0, floor = 0, waiting = 0, tokens = {0, 0, 0}, bytes = 0, claims = {},
    max_bypass = 16, age_ms = 30000, preempts = false, num_estimates = 0, error = 0, correction = 1,
  }
end

local executors, dirty_executors = {}, {}

local function load_executor(id)
  local executor = executors[id]
  if executor == nil then
    local text = call('HGET', EXECUTORS, id)
    executor = text and unpack_record(text)
    executors[id] = executor
  end
  return executor
end

local function available_blocks(executor)
  return executor.budget_blocks - executor.reserved_blocks
end

-- Whether and how much room the executors have that were changed. Silence takes one out of `room` only when `choose`
-- meets it there; one that is claimed is not for everybody.
local function flush_executors()
  for id, executor in pairs(dirty_executors) do
    call('HSET', EXECUTORS, id, pack(executor))
    if executor.accepting and not executor.suspended and not executor.claim
      and executor.reserved_sequences < executor.budget_sequences then
      call('ZADD', ROOM, -available_blocks(executor), id)
    else
      call('ZREM', ROOM, id)
    end
    dirty_executors[id] = nil
  end
end

local function save_executor(id, executor)
  executors[id], dirty_executors[id] = executor, executor
end

local tenants, dirty_tenants = {}, {}

local function load_tenant(name)
  local tenant = tenants[name]
  if tenant == nil then
    local text = call('HGET', TENANTS, name)
    tenant = text and unpack_record(text) or {
      counter = 0, weight = 1, lines = {0, 0, 0}, listed = {false, false, false}, active = false,
      waiting = 0, tokens = 0, bytes = 0, running = 0,
      max_running = huge, output_share = 1, request_ms = 0, token_ms = 0, ms_per_token = 0,
    }
    tenants[name] = tenant
  end
  return tenant
end

local function save_tenant(name, tenant)
  tenant.used_ms, dirty_tenants[name] = NOW, tenant
end

local function load_request(id)
  local text = call('HGET', REQUESTS, id)
  return text and unpack_record(text)
end

local function save_request(id, request)
  call('HSET', REQUESTS, id, pack(request))
end

-- Writes what was changed; ends every script.
local function finish(outcome)
  flush_executors()
  for name, tenant in pairs(dirty_tenants) do
    call('HSET', TENANTS, name, pack(tenant))
  end
  local text = pack(state)
  if text ~= text_of_state then
    call('SET', STATE, text)
  end
  return {outcome, events, missing, more, registered}
end
