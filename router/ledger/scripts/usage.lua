-- usage: reads the totals of a day.
--
-- KEYS        [1] the totals of a day  [2] the time since which totals are complete
-- ARGV        [1] cursor, first 0  [2] about how many accounts to return
-- returns     {the next cursor, 0 at the end, {{account, figures}, …}, that time in milliseconds or nil}, figures as text
-- complexity  O(accounts returned)
-- An account may be returned more than once.
local function run()
  local found = redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
  local accounts = {}
  for at = 1, #found[2], 2 do
    local sums, figures = {struct.unpack('<dddddddddddddddd', found[2][at + 1])}, {}
    for i = 1, 8 do
      local high, low = sums[2 * i - 1], sums[2 * i]
      figures[i] = high > 0 and string.format('%d%09d', high, low) or string.format('%d', low)
    end
    accounts[#accounts + 1] = {found[2][at], figures}
  end
  return {found[1], accounts, redis.call('GET', KEYS[2])}
end

outside_script('usage', run, {'no-writes'})
