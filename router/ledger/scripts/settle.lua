-- settle: ends placements: releases their reservations, charges tenants for what was used, and fills the seats.
--
-- KEYS        the pool's keys, mailboxes
-- ARGV        [1] caller  then for each the fields of SETTLE (codec.py): `computed` are tokens of the prompt, `computed` and
--             `output` may be ''
-- returns     {'SETTLED', number of requests that this call ended}
-- complexity  O(log N) for each, and that of board
-- A stale attempt is ignored. An id not in the ledger gets a tombstone, so that a report still on its way does not add
-- it. A repeated call ends nothing. Only the living owner of a request can cancel it.
local function is_served_elsewhere(request)
  return request.owner ~= CALLER and owners.lives(request.owner)
end

local function run()
  states.sweep_tombstones(#ARGV)
  local num_settled, ending, at = 0, {}, 2
  while at <= #ARGV do
    at = read_settle(ending, at)
    local id, attempt = ending.id, ending.attempt
    local request = load_request(id)
    if not request then
      states.ended_ms(id) -- an expired end does not concern this request
      states.add_tombstone(id)
    elseif request.attempt == attempt and request.state ~= 'WAITING'
      and not (ending.cancelled and is_served_elsewhere(request)) then
      local computed, output = ending.computed, ending.output
      local tenant = load_tenant(request.tenant)
      if computed and output then -- before the tenant may wait again and its counter be lifted
        tenants.settle_usage(request, tenant, computed, output)
      end
      states.withdraw(id, request)
      states.add_tombstone_with_ending(id, request, ending.cancelled)
      num_settled = num_settled + 1
      if computed and output then
        save_tenant(request.tenant, tenant)
        if ending.by_itself then
          lengths.learn_length(request, output)
        end
      end
    end
  end
  board.run()
  return reply.finish({'SETTLED', num_settled})
end

script('settle', run, {'allow-oom'})
