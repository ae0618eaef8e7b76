-- verify: names those of the caller's waiting requests that the ledger does not have in its queue.
--
-- KEYS        the pool's keys
-- ARGV        [1] caller  then for each the fields of VERIFY (codec.py): `attempt` is the last that the caller
--             knows of
-- returns     {'VERIFIED', {request id, …}}: those that are unknown, another router's, or placed or lost by an attempt
--             that the caller knows to be over
-- complexity  O(N) for N requests, of which a caller names at most 256
-- Changes nothing. A request placed or lost by a later attempt is not named: an event to the caller, or the audit,
-- reports it.

local function run()
  local ids, attempts, asked, at = {}, {}, {}, 2
  while at <= #ARGV do
    at = read_verify(asked, at)
    ids[#ids + 1], attempts[#attempts + 1] = asked.id, asked.attempt
  end

  local forgotten = {}
  local records = #ids > 0 and redis.call('HMGET', REQUESTS, unpack(ids)) or {}
  for i, text in ipairs(records) do
    local status, owner = '', ''
    local request = text and unpack_request(text)
    if text then
      status, owner = struct.unpack('<Hc0Hc0', text) -- where a record begins
    end
    if owner ~= CALLER or (status ~= 'WAITING' and request.attempt <= attempts[i]) then
      forgotten[#forgotten + 1] = ids[i]
    end
  end
  return reply.answer({'VERIFIED', forgotten})
end

script('verify', run, {'no-writes'})
