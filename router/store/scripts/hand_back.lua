-- hand_back: the owner returns a placement that came to nothing; the request stands in line again where it stood.
--
-- KEYS        the pool's keys, mailboxes
-- ARGV        [1] caller, who owns the request from now on  [2] request id  [3] attempt  [4] most attempts
--             [5] 'lost', 'rejected': the executor did not take it, or 'preempted': it gave way; the last two do not count
--             as attempts  [6] output tokens that it has: with some its deadline for waiting is behind it
-- returns     {'PLACED', attempt, executor, generation, blocks} | {'QUEUED', number ahead, estimated wait or ''}
--             | {'EXHAUSTED'} | {'STALE'}: it ended or moved on | {'UNKNOWN'} | {'AGAIN'} | {'DROPPED'}: as the event says
-- complexity  O(log N), and that of board
-- A repeat finds the request in line, or is stale. Unless it was preempted, the executor gets nothing new before its
-- next report: it has rejected, or its link has broken, and the ledger does not know yet what it will find.
local id, attempt, max_attempts = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local why, output = ARGV[5], tonumber(ARGV[6])

local function suspend(executor_id)
  local executor = load_executor(executor_id)
  if executor then
    executor.suspended = true
    save_executor(executor_id, executor)
  end
end

-- Puts the request back in line. False where it has had its attempts.
local function requeue(request)
  if request.state == 'PLACED' and why ~= 'preempted' then
    suspend(request.executor_id)
  end
  withdraw(id, request)
  if why ~= 'lost' then
    request.rejections = request.rejections + 1
  end
  if attempt - request.rejections >= max_attempts then
    bury(id)
    sweep_tombstones(2)
    return false
  end
  request.owner, request.executor_id, request.generation, request.placed_ms = CALLER, '', 0, 0
  request.reserved, request.output = 0, math.max(output, request.output)
  enqueue(id, request)
  save_request(id, request)
  return true
end

register()
local request = load_request(id)
if not request then
  return finish({ended_ms(id) and 'STALE' or 'UNKNOWN'})
end
if request.attempt ~= attempt or (request.state == 'WAITING' and request.owner ~= CALLER) then
  return finish({'STALE'})
end
local waits = request.state == 'WAITING' or requeue(request)
board()
if not waits then
  return finish({'EXHAUSTED'})
end
request = load_request(id)
if request and request.state == 'WAITING' and #missing > 0 then
  return finish({'AGAIN'})
end
return finish(request and standing(id, request) or {'DROPPED'})
