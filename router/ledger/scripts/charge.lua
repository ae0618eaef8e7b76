-- charge: books what accounts have used of an executor, each nanosecond and token once.
--
-- KEYS        [1] the totals of a day  [2] what is counted in them  [3] the time since which totals are complete
-- ARGV        [1] executor and generation  [2] milliseconds that the totals are kept  [3] the same of what is counted
--             [4] most entries of [2]  then pairs: account, its packed figures (codec.py)
-- returns     {entries that were left out because [2] is full, {{position of the account from 0, figures that were
--             added}, …}, 1 if there were no totals of the day before}, figures as text
-- complexity  O(1) for each account
-- The figures of an executor's account only grow. [2] has the largest of each that was booked, so a call that is repeated
-- or overtaken adds nothing, whichever router makes it. A sum may be too large for a number: it is kept in two parts.
local NUM_FIGURES = 8
local FIGURES, SUMS = '<dddddddd', '<dddddddddddddddd'
local BASE = 1e9 -- of the parts of a sum: higher, lower

-- Returns the figures that have grown since they were booked, or nil; and the largest of both.
local function growth(figures, booked)
  local added, has_grown = {}, false
  for i = 1, NUM_FIGURES do
    added[i] = math.max(0, figures[i] - booked[i])
    figures[i], has_grown = math.max(figures[i], booked[i]), has_grown or added[i] > 0
  end
  return has_grown and added
end

local function add(sums, added)
  for i = 1, NUM_FIGURES do
    local high, low = 2 * i - 1, 2 * i
    local lower = sums[low] + added[i] % BASE
    local carry = lower >= BASE and 1 or 0
    sums[low] = lower - carry * BASE
    sums[high] = sums[high] + math.floor(added[i] / BASE) + carry
  end
end

local function zeros(count)
  local found = {}
  for i = 1, count do
    found[i] = 0
  end
  return found
end

local function as_texts(figures)
  local texts = {}
  for i = 1, NUM_FIGURES do
    texts[i] = string.format('%d', figures[i])
  end
  return texts
end

local function run()
  local totals, counted, source = KEYS[1], KEYS[2], ARGV[1] .. '\0'
  local num_entries, num_left_out, booked = redis.call('HLEN', counted), 0, {}
  local is_first = redis.call('HLEN', totals) == 0
  if is_first then
    local time = redis.call('TIME')
    redis.call('SET', KEYS[3], string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000)), 'NX')
  end
  for at = 5, #ARGV, 2 do
    local account, figures = ARGV[at], {struct.unpack(FIGURES, ARGV[at + 1])}
    local text = redis.call('HGET', counted, source .. account)
    if not text and num_entries >= tonumber(ARGV[4]) then
      num_left_out = num_left_out + 1
    else
      local added = growth(figures, text and {struct.unpack(FIGURES, text)} or zeros(NUM_FIGURES))
      if added then
        local sum = redis.call('HGET', totals, account)
        local sums = sum and {struct.unpack(SUMS, sum)} or zeros(2 * NUM_FIGURES)
        add(sums, added)
        redis.call('HSET', totals, account, struct.pack(SUMS, unpack(sums, 1, 2 * NUM_FIGURES)))
        redis.call('HSET', counted, source .. account, struct.pack(FIGURES, unpack(figures, 1, NUM_FIGURES)))
        num_entries = num_entries + (text and 0 or 1)
        booked[#booked + 1] = {(at - 5) / 2, as_texts(added)}
      end
    end
  end
  redis.call('PEXPIRE', totals, ARGV[2])
  redis.call('PEXPIRE', counted, ARGV[3])
  return {num_left_out, booked, is_first and 1 or 0}
end

outside_script('charge', run)
