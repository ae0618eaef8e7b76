-- hand_back: the owner returns a placement that failed; the request gets its former position in the queue.
--
-- KEYS        the pool's keys, mailboxes
-- ARGV        [1] caller, who owns the request from now on  [2] request id  [3] attempt  [4] most attempts
--             [5] 'lost', 'stood_still': its executor reports a stalled engine, 'rejected': by the executor, or
--             'preempted'; the last two do not count as attempts, and 'lost' counts if the executor died
--             [6] output tokens so far: from the first on its queue deadline no longer applies  [7] 1 if this placement
--             produced tokens: then this loss and earlier ones do not count
--             [8] blocks of its next placement, or '' for those of the previous
-- returns     {'PLACED', attempt, executor, generation, blocks, 1 for a suspect} | {'QUEUED', number ahead, estimated
--             wait or ''} | {'EXHAUSTED'} | {'UNDECIDED'}: not known yet whether its attempts are used up; call
--             again soon | {'STALE'}: it ended, was placed again, or belongs to another living router | {'UNKNOWN'}
--             | {'AGAIN'} | {'DROPPED'}: as the event says
-- complexity  O(log N), and that of board
-- A repeated call finds the request waiting or undecided, or is stale. Unless the request was preempted, the executor
-- gets no new work before its next report: it rejected, or its link broke, and the ledger does not know its state.
--@flags allow-oom
local id, attempt, max_attempts = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local why, output, progressed = ARGV[5], tonumber(ARGV[6]), ARGV[7] == '1'

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
    local num_undecided = judge(request)
    if request.strikes - num_undecided >= max_attempts then
      bury_with_ending(id, request, false)
      sweep_tombstones(2)
      return 'EXHAUSTED'
    elseif request.strikes >= max_attempts then
      request.owner = CALLER
      set_lost(id, request)
      return 'UNDECIDED'
    end
  end
  if ARGV[8] ~= '' then
    set_placement_blocks(request, tonumber(ARGV[8]))
  end
  requeue(id, request, output)
  return nil
end

register()
local request = load_request(id)
if not request then
  return finish({ended_ms(id) and 'STALE' or 'UNKNOWN'})
end
local is_anothers = request.owner ~= CALLER and (request.state == 'WAITING' or lives(request.owner))
if request.attempt ~= attempt or is_anothers then
  return finish({'STALE'})
end
local refused = request.state ~= 'WAITING' and return_to_line(request) or nil
board()
if refused then
  return finish({refused})
end
request = load_request(id)
if request and request.state == 'WAITING' and #missing > 0 then
  return finish({'AGAIN'})
end
return finish(request and standing(id, request) or {'DROPPED'})
