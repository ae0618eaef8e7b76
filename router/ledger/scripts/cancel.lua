-- cancel: removes requests that have no executor, and asks the owners of placed requests to cancel them there.
--
-- KEYS        the pool's keys, mailboxes
-- ARGV        [1] caller  [2] until when the caller waits, or ''  then for each the fields of CANCEL (codec.py):
--             `is_own` to cancel it only if the caller owns it
-- returns     {'CANCELLED', {outcome, …}} | {'LATE'}: the caller no longer waits. Of each request: {state, attempt,
--             executor, generation, owner, 1 where another router was notified} with state WAITING, PLACED or LOST as it
--             was found | {'ENDED'} | {'UNKNOWN'} | {'AGAIN'}: call again for this one
-- complexity  O(log N) for each, and that of board
-- A repeated call finds the request ended, or asks its owner again. A waiting request's rate tokens are returned.
local has_found

local function cancel(id, is_own)
  local request = load_request(id)
  if not request then
    return {states.ended_ms(id) and 'ENDED' or 'UNKNOWN'}
  end
  if is_own and request.owner ~= CALLER and owners.lives(request.owner) then
    return {'UNKNOWN'}
  end
  if not owners.reachable(request.owner) then
    return {'AGAIN'}
  end

  has_found = true
  local notifies_owner = request.owner ~= CALLER and owners.lives(request.owner)
  local found = {
    request.state, request.attempt, request.executor_id, request.generation, request.owner, notifies_owner and 1 or 0,
  }
  if request.state ~= 'PLACED' then
    states.withdraw(id, request)
    states.add_tombstone_with_ending(id, request, true)
    states.sweep_tombstones(2)
    tenants.refund(request)
  end
  if notifies_owner then
    owners.notify(request.state == 'PLACED' and 'cancel' or 'cancelled', id, request)
  end
  return found
end

local function run()
  has_found = false
  if owners.is_late(ARGV[2]) then -- by now an id may belong to a repeated request in the queue
    return reply.finish({'LATE'})
  end
  local outcomes = {}
  local asked, at = {}, 3
  while at <= #ARGV do
    at = read_cancel(asked, at)
    outcomes[#outcomes + 1] = cancel(asked.id, asked.is_own)
  end
  if has_found then
    board.run()
  end
  return reply.finish({'CANCELLED', outcomes})
end

script('cancel', run, {'allow-oom'})
