-- cancel: takes a request that has no executor out for good, and asks the owner of one that has to cancel it there.
--
-- KEYS        the pool's keys, mailboxes
-- ARGV        [1] caller  [2] request id  [3] 1 where only a request of the caller's is meant, not another router's
--             [4] until when the caller waits, or ''
-- returns     {state, attempt, executor, generation, owner, 1 where another router was told} with state WAITING,
--             PLACED or LOST as it was found | {'ENDED'} | {'UNKNOWN'} | {'AGAIN'}
--             | {'LATE'}: the caller waits no more
-- complexity  O(log N), and that of board
-- A repeat finds the request ended, or asks again. One that leaves the line gets the tokens of its rate back.
local id = ARGV[2]
if is_late(ARGV[4]) then -- by now the id may be that of a repeat, which stands in line
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
