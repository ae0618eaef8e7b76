-- hand_back: the owner returns placements that failed; each request gets its former position in the queue.
--
-- KEYS        the pool's keys, mailboxes
-- ARGV        [1] caller, who owns the requests from now on  then for each: request id, attempt, most attempts,
--             'lost', 'stood_still': its executor reports a stalled engine, 'rejected': by the executor, or
--             'preempted'; the last two do not count as attempts, 'lost' counts if the executor died, and 'stood_still'
--             until the engine makes a step again, apart from deaths unless the executor dies; output tokens
--             so far: from the first on its queue deadline no longer applies; 1 if this placement produced tokens: then
--             this loss and earlier ones do not count; blocks of its next placement, or '' for those of the previous
-- returns     {'HANDED_BACK', {outcome, …}}. Of each: {'PLACED', attempt, executor, generation, blocks, 1 for a suspect, adapter}
--             | {'QUEUED', number ahead, estimated wait or ''} | {'EXHAUSTED'}: so many executors
--             died | {'STALLED'}: so many engines stall | {'UNDECIDED'}: not known yet whether
--             its attempts are used up; call again soon | {'STALE'}: it ended, was placed again, or belongs to another
--             living router | {'UNKNOWN'} | {'AGAIN'}: call again for this one | {'DROPPED'}: as the event says
-- complexity  O(log N) for each, and that of board
-- A repeated call finds the request waiting or undecided, or is stale. Unless the request was preempted, the executor
-- gets no new work before its next report: it rejected, or its link broke, and the ledger does not know its state.
--@flags allow-oom
local NUM_FIELDS = 7 -- of a placement
-- Of the placement at hand.
local id, attempt, max_attempts, why, output, progressed, blocks

local function suspend(executor_id)
  local executor = load_executor(executor_id)
  if executor then
    executor.suspended = true
    save_executor(executor_id, executor)
  end
end

-- Puts the request back into the queue. Returns nil, or the reason why it is not there.
local function return_to_line(request)
  if request.state == 'PLACED' and why ~= 'preempted' then
    suspend(request.executor_id)
  end
  withdraw(id, request)
  if why == 'lost' or why == 'stood_still' or progressed then
    strike(request, progressed, why == 'stood_still')
    local num_undecided, num_stalls = judge(request)
    local num_deaths = request.strikes - num_undecided - num_stalls
    if num_deaths >= max_attempts or num_stalls >= max_attempts then
      bury_with_ending(id, request, false)
      sweep_tombstones(2)
      return num_deaths >= max_attempts and 'EXHAUSTED' or 'STALLED'
    elseif num_deaths + num_undecided >= max_attempts then
      request.owner = CALLER
      set_lost(id, request)
      return 'UNDECIDED'
    end
  end
  if blocks ~= '' then
    set_placement_blocks(request, tonumber(blocks))
  end
  requeue(id, request, output)
  return nil
end

local has_found = false

-- Returns the outcome, or nil for a request that is in the queue.
local function hand_back(at)
  id, attempt, max_attempts = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  why, output, progressed, blocks = ARGV[at + 3], tonumber(ARGV[at + 4]), ARGV[at + 5] == '1', ARGV[at + 6]
  local request = load_request(id)
  if not request then
    return {ended_ms(id) and 'STALE' or 'UNKNOWN'}
  end
  local is_anothers = request.owner ~= CALLER and (request.state == 'WAITING' or lives(request.owner))
  if request.attempt ~= attempt or is_anothers then
    return {'STALE'}
  end
  has_found = true
  local refused = request.state ~= 'WAITING' and return_to_line(request) or nil
  return refused and {refused} or nil
end

-- Returns how the request stands after boarding.
local function outcome_of(request_id)
  local request = load_request(request_id)
  if request and request.state == 'WAITING' and #missing > 0 then
    return {'AGAIN'}
  end
  return request and standing(request_id, request) or {'DROPPED'}
end

register()
local outcomes, num_handed_back = {}, 0
for at = 2, #ARGV, NUM_FIELDS do
  num_handed_back = num_handed_back + 1
  outcomes[num_handed_back] = hand_back(at) or false
end
if has_found then
  board()
end
for number = 1, num_handed_back do
  outcomes[number] = outcomes[number] or outcome_of(ARGV[2 + (number - 1) * NUM_FIELDS])
end
return finish({'HANDED_BACK', outcomes})
