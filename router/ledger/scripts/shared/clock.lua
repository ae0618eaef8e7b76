-- Redis' clock, in milliseconds: no router's clock enters a decision. Only records.lua reads
-- it, and derives the ledger's clock from it, which never goes back. A test that steers time composes its scripts with
-- another source in this one's place; nothing that is shipped can.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
