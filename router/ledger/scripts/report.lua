-- report: applies executors' reports: sets their budgets, audits the ledger by what they hold, places waiting requests.
--
-- KEYS        the pool's keys, mailboxes
-- ARGV        [1] caller  then for each report the fields of REPORT (codec.py): `quantile` is that of outputs that the
--             executor reserves for, 1 for their end; speeds are 0 where not measured; `age_ms` is the time since the
--             report came to the caller; `held` is what the executor holds, packed: of each the member of `placements`
--             that it should be, with its length, and blocks; `adapters` are those that it serves (rules/adapters.lua);
--             `held_adapters` are those of what it holds, separated by spaces, '-' for none, or '' for none at all;
--             `checkpoints` are the recurrent states that it keeps (checkpoints.lua)
-- returns     {'REPORTED', {{'TAKEN', {request id, attempt, …}}, …}}: what the executor holds that the ledger has
--             superseded, for the caller to cancel there; {'OLD', {}} for a report seen before | {'AGAIN'}
-- complexity  O(H + P + MAX_LOST · log N) for each report of H held and P placed on the executor, both bounded by its
--             sequences; that of board if a report may have made room
-- A report seen before is OLD, so any number of routers may relay it. The audit runs once a second, or when an
-- earlier call could not finish it because a mailbox was unknown. A report like the one before makes no room, and most are:
-- then nothing is boarded. What only the time makes possible waits for the next end, or for `reap`. A call that marks many
-- placements as lost boards nothing either, but asks for `board`.
local AUDIT_INTERVAL_MS = 1000
local MAX_LOST = 32 -- placements that one call marks as lost: about a millisecond of Redis
local report = {} -- the report at hand
local may_board -- whether a report of this call may have made room
local num_lost -- by this call

local function is_old(executor)
  if report.generation ~= executor.generation then
    return report.generation < executor.generation and NOW - executor.last_report_ms <= LEASE_MS
  end
  return report.seq < executor.seq or (report.seq == executor.seq and not executor.audit_due)
end

-- Marks placements on the executor as lost: all of them, or all that are not among `unmatched`, which is left with what
-- is not a placement. Returns false if an owner could not be notified, or more are left than one call handles.
local function lose_placements(unmatched)
  local complete = true
  flush_writes(PLACEMENTS)
  for _, member in ipairs(redis.call('ZRANGEBYLEX', PLACEMENTS, states.placements_of(report.id))) do
    if unmatched and unmatched[member] then
      unmatched[member] = nil
    else
      local request_id = member:sub(#report.id + 2):match('^%d+%z(.*)')
      local request = load_request(request_id)
      if not request then
        redis.call('ZREM', PLACEMENTS, member)
      elseif not unmatched or NOW - request.placed_ms > AUDIT_GRACE_MS then
        if num_lost == MAX_LOST then
          return false
        end
        complete = states.lose(request_id, request, unmatched ~= nil) and complete
        may_board, num_lost = true, num_lost + 1
      end
    end
  end
  return complete
end

-- Returns the adapter of the `i`-th sequence that the executor holds, '' for none.
local function held_adapter(i)
  local number = 0
  for adapter in report.held_adapters:gmatch('%S+') do
    number = number + 1
    if number == i then
      return adapter ~= '-' and adapter or ''
    end
  end
  return ''
end

-- Records a sequence that the executor holds and the ledger does not have there. Returns true if it is superseded.
local function account_for(request_id, attempt, blocks, adapter)
  local request = load_request(request_id)
  if request and request.attempt >= attempt then
    return true
  end
  may_board = true
  if request then -- the ledger has lost this placement: the executor's report counts
    states.withdraw(request_id, request)
    states.clear_failures(request) -- its attempts before this one; and the executor may have a suspect
    states.seat(request_id, request, report.id, attempt, blocks)
    return false
  end
  local ended = states.ended_ms(request_id)
  if ended then -- the executor may have reported before it knew of a recent end
    return NOW - ended > AUDIT_GRACE_MS
  end
  request = states.new_request('', {
    tenant = '', prefixes = '', digest = '?', class = 2, deadline_in_ms = math.huge, blocks = blocks,
    placement_blocks = blocks, sequences = 1, prompt = 0, max = 0, output = 0, block_size = 1, bytes = 0,
    adapter = adapter,
  }, 0)
  request.charged = true
  states.seat(request_id, request, report.id, attempt, blocks)
  return false
end

-- Compares the ledger with what the executor holds. Returns what is superseded, or false if an owner could not be
-- notified.
local function audit()
  local unmatched, member, blocks, at = {}, nil, nil, 1
  while at <= #report.held do
    member, blocks, at = struct.unpack('<Hc0d', report.held, at)
    unmatched[member] = true
  end
  if not lose_placements(unmatched) then
    return false
  end
  tenants.list_tenants() -- tenants that lost placements may return before the floor follows
  local superseded, i = {}, 0
  at = next(unmatched) and 1 or #report.held + 1 -- in their order
  while at <= #report.held do
    member, blocks, at = struct.unpack('<Hc0d', report.held, at)
    i = i + 1
    local attempt, request_id = member:sub(#report.id + 2):match('^(%d+)%z(.*)')
    local is_unmatched = unmatched[member]
    if is_unmatched and account_for(request_id, tonumber(attempt), blocks, held_adapter(i)) then
      superseded[#superseded + 1] = request_id
      superseded[#superseded + 1] = tonumber(attempt)
    end
  end
  return superseded
end

-- The speeds of the pool follow those of its executors.
local function smoothed(old, new, weight)
  return new <= 0 and old or old > 0 and old + weight * (new - old) or new
end

-- Output and standby count while requests wait: then executors are as full as they get.
local function observe_speeds()
  state.step_ms = smoothed(state.step_ms, report.step_ms, 0.05)
  state.prefill_speed = smoothed(state.prefill_speed, report.prefill_tokens_per_s / 1000, 0.05)
  if state.waiting > 0 then
    state.output_speed = smoothed(state.output_speed, report.output_tokens_per_s / 1000, 0.3)
    state.standby = state.standby + 0.3 * (report.num_standby - state.standby)
  end
end

-- Whether the report at hand may make room on the executor, or changes what would fit there. A request
-- that did not fit before does not fit on less.
local function may_make_room(executor)
  return not places.takes_work(executor)
    or report.budget_blocks > executor.budget_blocks or report.total_blocks ~= executor.total_blocks
    or report.budget_sequences ~= executor.budget_sequences or report.accepting ~= executor.accepting
    or report.quantile ~= executor.quantile or report.ends_at_reservation ~= executor.ends_at_reservation
    or report.num_adapter_slots ~= executor.num_adapter_slots
    or executor.num_adapter_slots > 0 and adapters.served_on(report.id) ~= report.adapters
end

-- Applies the report at hand. Returns its outcome, or nil if an owner could not be notified.
local function apply()
  local executor, claim, num_slots = load_executor(report.id), '', 0
  if executor and is_old(executor) then
    return {'OLD', {}}
  end
  if executor and executor.generation ~= report.generation then
    if not lose_placements() then
      executor.suspended = true -- it gets none before the repeated call
      save_executor(report.id, executor)
      return nil
    end
    claim, num_slots, executor = executor.claim, executor.num_adapter_slots, nil
  end
  may_board = may_board or not executor or may_make_room(executor)
  executor = executor or {
    generation = report.generation, seq = report.seq, budget_blocks = 0, total_blocks = 0, budget_sequences = 0,
    reserved_blocks = 0, reserved_sequences = 0, quantile = 1, last_report_ms = 0, audited_ms = 0, accepting = false, suspended = false,
    audit_due = false, has_suspect = false, ends_at_reservation = false, claim = claim, prefill_speed = 0, prefilled_ms = 0,
    num_adapter_slots = num_slots, pins = '', id = report.id, is_out = false,
  }
  executor.generation, executor.seq = report.generation, report.seq
  executor.budget_blocks, executor.total_blocks = report.budget_blocks, report.total_blocks
  executor.budget_sequences, executor.accepting = report.budget_sequences, report.accepting
  executor.suspended, executor.quantile = false, report.quantile
  executor.last_report_ms = math.max(executor.last_report_ms, NOW - report.age_ms)
  executor.ends_at_reservation, executor.prefill_speed = report.ends_at_reservation, report.prefill_tokens_per_s / 1000
  adapters.set_served(executor, report.num_adapter_slots, report.adapters)
  checkpoints.set_kept(report.id, report.checkpoints)
  state.overcommits = state.overcommits or executor.quantile < 1
  observe_speeds()
  write_later('ZADD', SIZES, string.format('%d', report.total_blocks), report.id)
  write_later('ZADD', REPORTS, string.format('%d', executor.last_report_ms), report.id)

  local superseded = {}
  if executor.audit_due or NOW - executor.audited_ms >= AUDIT_INTERVAL_MS then
    executor.audit_due, executor.audited_ms = true, NOW
    save_executor(report.id, executor)
    superseded = audit()
    if not superseded then
      return nil
    end
    executor.audit_due = false
  end
  save_executor(report.id, executor)
  return {'TAKEN', superseded}
end

local function run()
  may_board, num_lost = nil, 0
  local outcomes, taken, is_complete, at = {}, {}, true, 2
  while at <= #ARGV do
    at = read_report(report, at)
    local outcome = apply()
    is_complete = is_complete and outcome ~= nil
    outcomes[#outcomes + 1] = outcome
    if outcome and outcome[1] == 'TAKEN' then
      taken[#taken + 1] = report.id
    end
  end
  if not is_complete then
    for _, executor_id in ipairs(taken) do -- the repeated call returns these again
      local executor = load_executor(executor_id)
      executor.audit_due = true
      save_executor(executor_id, executor)
    end
    state.unboarded = state.unboarded or may_board
    return reply.finish({'AGAIN'})
  end
  if num_lost > MAX_BOARDED then -- that took long enough: the caller calls `board`
    more, state.unboarded = 1, true
  elseif may_board or state.unboarded then
    flush_writes(SIZES)
    board.run()
  end
  return reply.finish({'REPORTED', outcomes})
end

script('report', run, {'allow-oom'})
