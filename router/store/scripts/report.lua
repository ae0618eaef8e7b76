-- report: applies an executor's report: sets its budget, audits the ledger by what it holds, places waiting requests.
--
-- KEYS        the pool's keys, mailboxes
-- ARGV        [1] caller  [2] executor  [3] generation  [4] seq  [5] budget blocks  [6] total blocks
--             [7] budget sequences  [8] 1 if it accepts new work  [9] the quantile of outputs that it reserves for, 1
--             for their end  [10] milliseconds of a step  [11] prompt tokens per second, both 0 where not measured
--             [12] 1 if it ends a placement at the end of its reservation
--             then triples of what it holds: request id, attempt, blocks
-- returns     {'TAKEN', {request id, attempt, …}}: held by the executor but superseded in the ledger; the caller
--             cancels them there | {'OLD'} | {'AGAIN'}
-- complexity  O(H + P · log N) for H held and P placed on the executor, both bounded by its sequences; that of board
-- A report seen before is OLD, so any number of routers may relay it. The audit runs once a second, or when an
-- earlier call could not finish it because a mailbox was unknown.
--@flags allow-oom
local AUDIT_INTERVAL_MS = 1000
local id, generation, seq = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local FIRST_HELD = 13

local function is_old(executor)
  if generation ~= executor.generation then
    return generation < executor.generation and NOW - executor.last_report_ms <= LEASE_MS
  end
  return seq < executor.seq or (seq == executor.seq and not executor.audit_due)
end

-- Marks placements on the executor as lost: all of them, or all that are not in `spared`. Returns false if an owner
-- could not be notified.
local function lose_placements(spared)
  local complete = true
  for _, member in ipairs(redis.call('ZRANGEBYLEX', PLACEMENTS, placements_of(id))) do
    if not (spared and spared(member)) then
      local request_id = member:sub(#id + 2):match('^%d+%z(.*)')
      local request = load_request(request_id)
      if not request then
        redis.call('ZREM', PLACEMENTS, member)
      elseif not spared or NOW - request.placed_ms > AUDIT_GRACE_MS then
        complete = lose(request_id, request, spared ~= nil) and complete
      end
    end
  end
  return complete
end

-- Records a sequence that the executor holds and the ledger does not have there. Returns true if it is superseded.
local function account_for(request_id, attempt, blocks)
  local request = load_request(request_id)
  if request and request.attempt >= attempt then
    return true
  end
  if request then -- the ledger has lost this placement: the executor's report counts
    withdraw(request_id, request)
    forgive(request) -- its attempts before this one; and the executor may have a suspect
    seat(request_id, request, id, attempt, blocks)
    return false
  end
  local ended = ended_ms(request_id)
  if ended then -- the executor may have reported before it knew of a recent end
    return NOW - ended > AUDIT_GRACE_MS
  end
  request = new_request('', '', '', '?', 2, math.huge, blocks, blocks, 1, 0, 0, 0, 0, 1, 0)
  request.charged = true
  seat(request_id, request, id, attempt, blocks)
  return false
end

-- Compares the ledger with what the executor holds. Returns what is superseded, or false if an owner could not be
-- notified.
local function audit()
  local unmatched = {}
  for i = FIRST_HELD, #ARGV, 3 do
    unmatched[placement_member(id, tonumber(ARGV[i + 1]), ARGV[i])] = true
  end
  local complete = lose_placements(function(member)
    local holds = unmatched[member]
    unmatched[member] = nil
    return holds
  end)
  if not complete then
    return false
  end
  list_tenants() -- tenants that lost placements may return before the floor follows
  local superseded = {}
  for i = FIRST_HELD, #ARGV, 3 do
    local attempt = tonumber(ARGV[i + 1])
    local is_unmatched = unmatched[placement_member(id, attempt, ARGV[i])]
    if is_unmatched and account_for(ARGV[i], attempt, tonumber(ARGV[i + 2])) then
      superseded[#superseded + 1] = ARGV[i]
      superseded[#superseded + 1] = attempt
    end
  end
  return superseded
end

-- The speeds of the pool follow those of its executors.
local function observe_speeds(step_ms, tokens_per_s)
  if step_ms > 0 then
    state.step_ms = state.step_ms > 0 and 0.95 * state.step_ms + 0.05 * step_ms or step_ms
  end
  if tokens_per_s > 0 then
    local speed = tokens_per_s / 1000
    state.prefill_speed = state.prefill_speed > 0 and 0.95 * state.prefill_speed + 0.05 * speed or speed
  end
end

local executor, claim = load_executor(id), ''
if executor and is_old(executor) then
  return finish({'OLD'})
end
if executor and executor.generation ~= generation then
  if not lose_placements() then
    return finish({'AGAIN'})
  end
  claim, executor = executor.claim, nil
end
executor = executor or {
  reserved_blocks = 0, reserved_sequences = 0, audited_ms = 0, audit_due = false, has_suspect = false,
  claim = claim, prefilled_ms = 0,
}
executor.generation, executor.seq = generation, seq
executor.budget_blocks, executor.total_blocks = tonumber(ARGV[5]), tonumber(ARGV[6])
executor.budget_sequences, executor.accepting = tonumber(ARGV[7]), ARGV[8] == '1'
executor.suspended, executor.last_report_ms, executor.quantile = false, NOW, tonumber(ARGV[9])
executor.ends_at_reservation, executor.prefill_speed = ARGV[12] == '1', tonumber(ARGV[11]) / 1000
state.overcommits = state.overcommits or executor.quantile < 1
observe_speeds(tonumber(ARGV[10]), tonumber(ARGV[11]))
redis.call('ZADD', SIZES, ARGV[6], id)
redis.call('ZADD', REPORTS, NOW_TEXT, id)

local superseded = {}
if executor.audit_due or NOW - executor.audited_ms >= AUDIT_INTERVAL_MS then
  executor.audit_due, executor.audited_ms = true, NOW
  save_executor(id, executor)
  superseded = audit()
  if not superseded then
    return finish({'AGAIN'})
  end
  executor.audit_due = false
end
save_executor(id, executor)
board()
return finish({'TAKEN', superseded})
