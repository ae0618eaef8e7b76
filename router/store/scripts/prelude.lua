-- What every script of the store shares: keys, records, and `board`. Prepended to each, behind clock.lua.
--
-- KEYS     [1..15] the pool's keys, in the order of keys.py; [16..] the mailboxes that the caller knows.
-- ARGV     [1] the calling router; the rest is the script's own.
-- returns  {outcome, events, missing, more, registered}, the same for every script:
--            outcome     the script's own answer; {'AGAIN'}: call it again with the same arguments
--            events      what the caller must know of its own requests, each a flat list of fields and values
--            missing     live routers whose mailbox is needed and was not passed; what concerns them was left undone
--            more        1 where `board` stopped at its bound
--            registered  1 where the pool did not know the caller: what waited in its name may be gone
--
-- A request is in exactly one state, and `withdraw` takes it out of any of them:
--   WAITING  in line: in `waiting:<class>` and `waiting_by_owner`
--   PLACED   reserved on an executor: in `placements` and in the executor's reserved sums
--   LOST     taken back from an executor; its owner was told and hands it back or settles it: in `lost`
-- It ends by leaving `requests`, for a tombstone in `ended`.

local EXECUTORS, ROOM, SIZES, REPORTS, REQUESTS = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local WAITING = {KEYS[6], KEYS[7], KEYS[8]}
local WAITING_BY_OWNER, PLACEMENTS, LOST, ENDED = KEYS[9], KEYS[10], KEYS[11], KEYS[12]
local ROUTERS, ARRIVALS, ATTENDED = KEYS[13], KEYS[14], KEYS[15]
local NUM_POOL_KEYS = 15

local SILENT_MS = 2000        -- an executor that reported no later gets no new work
local LEASE_MS = 5000         -- an executor or router silent for longer is gone
local AUDIT_GRACE_MS = 2000   -- how long a placement may take to show up in its executor's reports
local TOMBSTONE_MS = 60000    -- how long an ended id is remembered; outlives any report in flight
local NO_DEADLINE_MS = 1e15   -- sorts behind every deadline, exact in a double
local MAX_HEADS = 32          -- heads of the line that one call deals with
local MAX_CANDIDATES = 8      -- executors looked at for a seat at a time
local MAILBOX_ENTRIES = 10000 -- about how many unread entries a mailbox keeps
local MAILBOX_MS = 600000     -- an unread mailbox is deleted after this long

local NOW = now_ms()
local CALLER = ARGV[1]

local events, missing, more, registered = {}, {}, 0, 0

local function finish(outcome)
  return {outcome, events, missing, more, registered}
end

-- Records ------------------------------------------------------------------------------------------------------

local executors = {} -- decoded in this call

local function load_executor(id)
  if executors[id] == nil then
    local text = redis.call('HGET', EXECUTORS, id)
    executors[id] = text and cjson.decode(text)
  end
  return executors[id]
end

-- Writes the record, and whether and how much room the executor has. Silence takes it out of `room` only when
-- `choose` meets it there.
local function save_executor(id, executor)
  executors[id] = executor
  redis.call('HSET', EXECUTORS, id, cjson.encode(executor))
  if executor.accepting and not executor.suspended and executor.reserved_sequences < executor.budget_sequences then
    redis.call('ZADD', ROOM, executor.reserved_blocks - executor.budget_blocks, id)
  else
    redis.call('ZREM', ROOM, id)
  end
end

local function load_request(id)
  local text = redis.call('HGET', REQUESTS, id)
  return text and cjson.decode(text)
end

local function save_request(id, request)
  redis.call('HSET', REQUESTS, id, cjson.encode(request))
end

local function placement_member(executor_id, attempt, id)
  return executor_id .. '\0' .. string.format('%d', attempt) .. '\0' .. id
end

local function waiting_member(id, request)
  return string.format('%016d:%s', request.arrival, id)
end

local function owner_member(id, request)
  return request.owner .. '\0' .. id
end

-- Owners -------------------------------------------------------------------------------------------------------

-- Renews the caller's lease. Only `reap` ends one, and marks it with 0 before it forgets what waits in its name.
local function register()
  local until_ms = redis.call('ZSCORE', ROUTERS, CALLER)
  if not until_ms or tonumber(until_ms) == 0 then
    registered = 1
  end
  redis.call('ZADD', ROUTERS, NOW + LEASE_MS, CALLER)
end

local living = {[CALLER] = true, [''] = false} -- looked up in this call; '' owns what only an executor knew of

local function lives(owner)
  if living[owner] == nil then
    local until_ms = redis.call('ZSCORE', ROUTERS, owner)
    living[owner] = until_ms ~= false and tonumber(until_ms) > 0
  end
  return living[owner]
end

local mailboxes -- router -> key, of those passed

local function mailbox_of(owner)
  if not mailboxes then
    mailboxes = {}
    local prefix = #EXECUTORS - #'executors' + #'mailbox:'
    for i = NUM_POOL_KEYS + 1, #KEYS do
      mailboxes[KEYS[i]:sub(prefix + 1)] = KEYS[i]
    end
  end
  return mailboxes[owner]
end

-- Whether `tell` can tell the owner. Asked before anything about its request is changed.
local function reachable(owner)
  if owner == CALLER or not lives(owner) or mailbox_of(owner) then
    return true
  end
  for _, name in ipairs(missing) do
    if name == owner then
      return false
    end
  end
  missing[#missing + 1] = owner
  return false
end

-- Tells the request's owner, if it lives: the caller by this call's reply, others by mailbox.
local function tell(kind, id, request)
  local fields = {
    'kind', kind, 'request_id', id, 'attempt', request.attempt,
    'executor_id', request.executor_id or '', 'generation', request.generation or 0,
  }
  if request.owner == CALLER then
    events[#events + 1] = fields
  elseif lives(request.owner) then
    local mailbox = mailbox_of(request.owner)
    redis.call('XADD', mailbox, 'MAXLEN', '~', MAILBOX_ENTRIES, '*', unpack(fields))
    redis.call('PEXPIRE', mailbox, MAILBOX_MS)
  end
end

-- States -------------------------------------------------------------------------------------------------------

-- Takes the request out of the state it is in; its reservation returns to its executor.
local function withdraw(id, request)
  if request.state == 'WAITING' then
    redis.call('ZREM', WAITING[request.class], waiting_member(id, request))
    redis.call('ZREM', WAITING_BY_OWNER, owner_member(id, request))
  elseif request.state == 'PLACED' then
    redis.call('ZREM', PLACEMENTS, placement_member(request.executor_id, request.attempt, id))
    local executor = load_executor(request.executor_id)
    if executor then
      executor.reserved_blocks = executor.reserved_blocks - request.blocks
      executor.reserved_sequences = executor.reserved_sequences - request.sequences
      save_executor(request.executor_id, executor)
    end
  elseif request.state == 'LOST' then
    redis.call('ZREM', LOST, id)
  end
end

-- Puts the request in line, by the order key that it has had from the start.
local function enqueue(id, request)
  request.state = 'WAITING'
  redis.call('ZADD', WAITING[request.class], request.deadline_ms, waiting_member(id, request))
  redis.call('ZADD', WAITING_BY_OWNER, 0, owner_member(id, request))
  save_request(id, request)
end

-- Reserves blocks and sequences of the executor for this attempt.
local function seat(id, request, executor_id, attempt)
  local executor = load_executor(executor_id)
  request.state, request.attempt, request.placed_ms = 'PLACED', attempt, NOW
  request.executor_id, request.generation = executor_id, executor.generation
  executor.reserved_blocks = executor.reserved_blocks + request.blocks
  executor.reserved_sequences = executor.reserved_sequences + request.sequences
  save_executor(executor_id, executor)
  redis.call('ZADD', PLACEMENTS, 0, placement_member(executor_id, attempt, id))
  save_request(id, request)
end

-- Takes a placement back and leaves it to its owner what follows. An owner that is gone is not waited for. False,
-- and nothing done, where the owner cannot be told.
local function lose(id, request)
  if not reachable(request.owner) then
    return false
  end
  withdraw(id, request)
  if lives(request.owner) then
    request.state = 'LOST'
    save_request(id, request)
    redis.call('ZADD', LOST, NOW, id)
    tell('lost', id, request)
  else
    redis.call('HDEL', REQUESTS, id)
  end
  return true
end

-- Forgets up to `limit` ended ids that are out of date.
local function sweep_tombstones(limit)
  local old = redis.call('ZRANGEBYSCORE', ENDED, '-inf', NOW - TOMBSTONE_MS - 1, 'LIMIT', 0, limit)
  if #old > 0 then
    redis.call('ZREM', ENDED, unpack(old))
  end
end

-- Leaves a tombstone. Sweeping two for each one keeps `ended` from growing.
local function bury(id)
  redis.call('HDEL', REQUESTS, id)
  redis.call('ZADD', ENDED, NOW, id)
  sweep_tombstones(2)
end

-- When the id ended, or nil where that is not known (any more).
local function ended_ms(id)
  local ended = redis.call('ZSCORE', ENDED, id)
  if ended and NOW - tonumber(ended) <= TOMBSTONE_MS then
    return tonumber(ended)
  end
  return nil
end

-- How a WAITING or PLACED request stands, as an outcome.
local function standing(id, request)
  if request.state == 'PLACED' then
    return {'PLACED', request.attempt, request.executor_id, request.generation}
  end
  local ahead = redis.call('ZRANK', WAITING[request.class], waiting_member(id, request))
  for class = 1, request.class - 1 do
    ahead = ahead + redis.call('ZCARD', WAITING[class])
  end
  return {'QUEUED', ahead}
end

-- Boarding -----------------------------------------------------------------------------------------------------

-- The live executor with room and the most available blocks, ties by id; nil where there is none. Each round but the
-- last takes executors that have fallen silent out of `room`, where only a save puts them back.
local function choose(blocks, sequences)
  for _ = 1, 32 do
    local silent = false
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', ROOM, '-inf', -blocks, 'LIMIT', 0, MAX_CANDIDATES)) do
      local executor = load_executor(id)
      if not executor or NOW - executor.last_report_ms > SILENT_MS then
        redis.call('ZREM', ROOM, id)
        silent = true
      elseif executor.budget_sequences - executor.reserved_sequences >= sequences then
        return id
      end
    end
    if not silent then
      return nil
    end
  end
  return nil
end

-- Whether some executor, empty, would hold this much. Those silent up to their lease count: they may come back.
local function fits_somewhere(blocks, sequences)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', SIZES, blocks, '+inf', 'LIMIT', 0, 64)) do
    local executor = load_executor(id)
    if executor and executor.budget_sequences >= sequences then
      return true
    end
  end
  return false
end

local function somebody_waits()
  return redis.call('EXISTS', unpack(WAITING)) > 0
end

-- The first in line: class, then deadline, then arrival. An entry without a record (evicted) is dropped.
local function head()
  for class = 1, #WAITING do
    local member = redis.call('ZRANGE', WAITING[class], 0, 0)[1]
    if member then
      local id = member:match(':(.*)')
      local request = load_request(id)
      if not request then
        redis.call('ZREM', WAITING[class], member)
      end
      return id, request
    end
  end
  return nil
end

-- Takes the request out of the line for good.
local function drop(kind, id, request)
  withdraw(id, request)
  bury(id)
  tell(kind, id, request)
end

-- Deals with the first in line. False where the line holds: a bounded bypass of a head that does not fit has its
-- place here.
local function board_head(id, request)
  if not lives(request.owner) then
    withdraw(id, request)
    redis.call('HDEL', REQUESTS, id)
    return true
  end
  if request.deadline_ms < NOW and not request.has_output then
    drop('expired', id, request)
    return true
  end
  local executor_id = choose(request.blocks, request.sequences)
  if executor_id then
    withdraw(id, request)
    seat(id, request, executor_id, request.attempt + 1)
    tell('placed', id, request)
    return true
  end
  if redis.call('ZCARD', SIZES) > 0 and not fits_somewhere(request.blocks, request.sequences) then
    drop('never_fits', id, request)
    return true
  end
  return false
end

-- Seats as many as fit, in order. Ends every script that may have opened a seat.
local function board()
  if not somebody_waits() then
    return
  end
  for _ = 1, MAX_HEADS do
    local id, request = head()
    if not id then
      return
    end
    if request and (not reachable(request.owner) or not board_head(id, request)) then
      return
    end
  end
  more = 1
end
