-- settle: ends placements; their reservations return and the seats are filled again.
--
-- KEYS        the pool's keys, mailboxes
-- ARGV        [1] caller  then pairs: request id, attempt
-- returns     {'SETTLED', number of requests that this call ended}
-- complexity  O(log N) for each pair, and that of board
-- A stale attempt is left alone. An id not in the ledger gets a tombstone, so that a report still on its way does
-- not add it. A repeat ends nothing.
local num_settled = 0
for i = 2, #ARGV, 2 do
  local id, attempt = ARGV[i], tonumber(ARGV[i + 1])
  local request = load_request(id)
  if not request then
    bury(id)
  elseif request.attempt == attempt and request.state ~= 'WAITING' then
    withdraw(id, request)
    bury(id)
    num_settled = num_settled + 1
  end
end
board()
return finish({'SETTLED', num_settled})
