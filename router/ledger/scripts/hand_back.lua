-- hand_back: the owner returns placements that failed; each request gets its former position in the queue.
--
-- KEYS        the pool's keys, mailboxes
-- ARGV        [1] caller, who owns the requests from now on  then for each the fields of HAND_BACK (codec.py):
--             `why` is 'lost', 'stood_still': its executor reports a stalled engine, 'rejected': by the executor, or
--             'preempted'; the last two do not count as attempts, 'lost' counts if the executor died, and 'stood_still'
--             until the engine makes a step again, apart from deaths unless the executor dies; `output` are the tokens
--             so far: from the first on its queue deadline no longer applies; `progressed` if this placement produced
--             tokens: then this loss and earlier ones do not count; `blocks` are those of its next placement, or '' for
--             those of the previous
-- returns     {'HANDED_BACK', {outcome, …}}. Of each: {'PLACED', attempt, executor, generation, blocks, 1 for a suspect, adapter}
--             | {'QUEUED', number ahead, estimated wait or ''} | {'EXHAUSTED'}: so many executors
--             died | {'STALLED'}: so many engines stall | {'UNDECIDED'}: not known yet whether
--             its attempts are used up; call again soon | {'STALE'}: it ended, was placed again, or belongs to another
--             living router | {'UNKNOWN'} | {'AGAIN'}: call again for this one | {'DROPPED'}: as the event says
-- complexity  O(log N) for each, and that of board
-- A repeated call finds the request waiting or undecided, or is stale. Unless the request was preempted, the executor
-- gets no new work before its next report: it rejected, or its link broke, and the ledger does not know its state.
local asked = {} -- the placement at hand

local function suspend(executor_id)
  local executor = load_executor(executor_id)
  if executor then
    executor.suspended = true
    save_executor(executor_id, executor)
  end
end

-- Puts the request back into the queue. Returns nil, or the reason why it is not there.
local function return_to_line(request)
  if request.state == 'PLACED' and asked.why ~= 'preempted' then
    suspend(request.executor_id)
  end
  states.withdraw(asked.id, request)
  if asked.why == 'lost' or asked.why == 'stood_still' or asked.progressed then
    states.record_failure(request, asked.progressed, asked.why == 'stood_still')
    local num_undecided, num_stalls = states.decide_failures(request)
    local num_deaths = request.failures - num_undecided - num_stalls
    if num_deaths >= asked.max_attempts or num_stalls >= asked.max_attempts then
      states.add_tombstone_with_ending(asked.id, request, false)
      states.sweep_tombstones(2)
      return num_deaths >= asked.max_attempts and 'EXHAUSTED' or 'STALLED'
    elseif num_deaths + num_undecided >= asked.max_attempts then
      request.owner = CALLER
      states.set_lost(asked.id, request)
      return 'UNDECIDED'
    end
  end
  if asked.blocks then
    states.set_placement_blocks(request, asked.blocks)
  end
  states.requeue(asked.id, request, asked.output)
  return nil
end

local has_found

-- Returns the outcome, or nil for a request that is in the queue.
local function hand_back()
  local request = load_request(asked.id)
  if not request then
    return {states.ended_ms(asked.id) and 'STALE' or 'UNKNOWN'}
  end
  local is_anothers = request.owner ~= CALLER and (request.state == 'WAITING' or owners.lives(request.owner))
  if request.attempt ~= asked.attempt or is_anothers then
    return {'STALE'}
  end
  has_found = true
  local refused = request.state ~= 'WAITING' and return_to_line(request) or nil
  return refused and {refused} or nil
end

-- Returns how the request stands after boarding.
local function outcome_of(id)
  local request = load_request(id)
  if request and request.state == 'WAITING' and #missing > 0 then
    return {'AGAIN'}
  end
  return request and states.standing(id, request) or {'DROPPED'}
end

local function run()
  has_found = false
  owners.register()
  local outcomes, ids, at = {}, {}, 2
  while at <= #ARGV do
    at = read_hand_back(asked, at)
    ids[#ids + 1] = asked.id
    outcomes[#ids] = hand_back() or false
  end
  if has_found then
    board.run()
  end
  for number, id in ipairs(ids) do
    outcomes[number] = outcomes[number] or outcome_of(id)
  end
  return reply.finish({'HANDED_BACK', outcomes})
end

script('hand_back', run, {'allow-oom'})
