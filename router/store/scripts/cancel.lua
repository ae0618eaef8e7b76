-- cancel: removes a request that has no executor, and asks the owner of a placed request to cancel it there.
--
-- KEYS        the pool's keys, mailboxes
-- ARGV        [1] caller  [2] request id  [3] 1 to cancel it only if the caller owns it
--             [4] until when the caller waits, or ''
-- returns     {state, attempt, executor, generation, owner, 1 where another router was told} with state WAITING,
--             PLACED or LOST as it was found | {'ENDED'} | {'UNKNOWN'} | {'AGAIN'}
--             | {'LATE'}: the caller no longer waits
-- complexity  O(log N), and that of board
-- A repeated call finds the request ended, or asks its owner again. A waiting request's rate tokens are returned.
--@flags allow-oom
local id = ARGV[2]
if is_late(ARGV[4]) then -- by now the id may belong to a repeated request in the queue
  return finish({'LATE'})
end
local request = load_request(id)
if not request then
  return finish({ended_ms(id) and 'ENDED' or 'UNKNOWN'})
end
if ARGV[3] == '1' and request.owner ~= CALLER and lives(request.owner) then
  return finish({'UNKNOWN'})
end
if not reachable(request.owner) then
  return finish({'AGAIN'})
end

local told = request.owner ~= CALLER and lives(request.owner)
local found = {
  request.state, request.attempt, request.executor_id, request.generation, request.owner, told and 1 or 0,
}
if request.state ~= 'PLACED' then
  withdraw(id, request)
  bury_with_ending(id, request, true)
  sweep_tombstones(2)
  refund(request)
end
if told then
  tell(request.state == 'PLACED' and 'cancel' or 'cancelled', id, request)
end
board()
return finish(found)
