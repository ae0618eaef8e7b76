-- hand_back: the owner returns a placement that came to nothing; the request stands in line again where it stood.
--
-- KEYS        the pool's keys, mailboxes
-- ARGV        [1] caller, who owns the request from now on  [2] request id  [3] attempt  [4] most attempts
--             [5] 'lost', 'stood_still': its executor says that its engine did, 'rejected': the executor did not take it,
--             or 'preempted': it gave way; the last two do not count as attempts, and 'lost' does where the executor has
--             died  [6] output tokens that it has: with some its deadline for waiting is behind it  [7] 1 where tokens
--             came of this placement: that does not count either, nor what was counted before
-- returns     {'PLACED', attempt, executor, generation, blocks, 1 for a suspect} | {'QUEUED', number ahead, estimated
--             wait or ''} | {'EXHAUSTED'} | {'UNDECIDED'}: not known yet whether it has had its attempts; to be
--             asked again soon | {'STALE'}: it ended, moved on, or is another living router's | {'UNKNOWN'}
--             | {'AGAIN'} | {'DROPPED'}: as the event says
-- complexity  O(log N), and that of board
-- A repeat finds the request in line or undecided, or is stale. Unless it was preempted, the executor gets nothing new before its
-- next report: it has rejected, or its link has broken, and the ledger does not know yet what it will find.
local id, attempt, max_attempts = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local why, output, progressed = ARGV[5], tonumber(ARGV[6]), ARGV[7] == '1'

local function suspend(executor_id)
  local executor = load_executor(executor_id)
  if executor then
    executor.suspended = true
    save_executor(executor_id, executor)
  end
end

-- What becomes of the request: nil where it is back in line, else why it is not.
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
