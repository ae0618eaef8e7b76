-- adopt: makes the caller the owner of a placed request, so that it can attach to its executor without the prompt.
--
-- KEYS        the pool's keys, mailboxes
-- ARGV        [1] caller, who owns the request from now on  [2] request id  [3] until when the caller waits, or ''
-- returns     {'ADOPTED', attempt, executor, generation, blocks, 1 for a suspect, adapter} | {'ADOPTED_ENDED', …}: it has ended,
--             there | {'WAITING'} | {'LOST'} | {'ENDED'}: never placed, or its executor is not known | {'UNKNOWN'}
--             | {'TAKEN_OVER'}: another router has taken over the first choice of this one's request
--             | {'AGAIN'} | {'LATE'}: the caller no longer waits
-- complexity  O(log R) for R routers
-- Changes only the owner of a placed request; the previous owner is notified if it is alive. A repeated call returns
-- the same.

local function run()
  local id = ARGV[2]

  if owners.is_late(ARGV[3]) then
    return reply.finish({'LATE'})
  end
  owners.register()
  if states.has_lost_first_choice(id) then
    return reply.finish({'TAKEN_OVER'})
  end
  local request = load_request(id)
  if not request then
    local ended = states.ended_ms(id)
    local ending = ended and states.load_ending(id)
    if ending and ending.executor_id ~= '' then
      return reply.finish(states.placed_once(ending))
    end
    return reply.finish({ended and 'ENDED' or 'UNKNOWN'})
  end
  if request.state ~= 'PLACED' then
    return reply.finish({request.state})
  end
  if not owners.reachable(request.owner) then
    return reply.finish({'AGAIN'})
  end
  states.take_over(id, request)
  request.adopted = true
  save_request(id, request)
  return reply.finish(states.placed(request))
end

script('adopt', run, {'allow-oom'})
