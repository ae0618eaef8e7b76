-- Lengths: output lengths learned from completions, and the reservations that follow from them.
--
-- For each tenant and size of `max_tokens` (a power of two), and for all tenants together, `lengths` has a histogram:
-- bin i of 25 counts outputs of up to size · 2^((i - 25) / 3) tokens. Counts are halved when they reach MAX_COUNT, so
-- that the last few hundred completions count. Kept only while some executor reserves less than `max_tokens`.
local NUM_BINS = 25
local BINS_PER_DOUBLING = 3
local MAX_COUNT = 512
local MIN_COUNT = 32

local function size_of(max_tokens)
  return 2 ^ math.ceil(math.log(math.max(1, max_tokens)) / math.log(2) - 1e-9)
end

local function bin_of(size, tokens)
  local bin = NUM_BINS + math.ceil(BINS_PER_DOUBLING * math.log(math.max(1, tokens) / size) / math.log(2) - 1e-9)
  return math.max(1, math.min(NUM_BINS, bin))
end

local function tokens_of(size, bin)
  return math.ceil(size * 2 ^ ((bin - NUM_BINS) / BINS_PER_DOUBLING))
end

local dirty_histograms = {} -- those that `finish` writes
local likely = {} -- the last arguments of `likely_output`, and its result: `tokens`

at_begin(function()
  if next(dirty_histograms) then dirty_histograms = cleared(dirty_histograms) end
  likely.request = nil
end)

local function load_histogram(field)
  local histogram = kept.histograms[field]
  if histogram == nil then
    local text = redis.call('HGET', LENGTHS, field)
    histogram = text and cmsgpack.unpack(text) or {count = 0, bins = {}}
    kept.histograms[field], kept.num = histogram, kept.num + 1
  end
  return histogram
end

local function add_length(field, bin)
  local histogram = load_histogram(field)
  if histogram.count >= MAX_COUNT or histogram.count == 0 then
    for i = 1, NUM_BINS do
      histogram.bins[i] = (histogram.bins[i] or 0) / 2
    end
    histogram.count = histogram.count / 2
  end
  histogram.bins[bin] = histogram.bins[bin] + 1
  histogram.count = histogram.count + 1
  dirty_histograms[field] = histogram
end

-- Writes each changed histogram once, however many ends it has learned from.
function lengths.flush_histograms()
  for field, histogram in pairs(dirty_histograms) do
    write_later('HSET', LENGTHS, field, cmsgpack.pack(histogram))
  end
end

-- Learns from a completion. A request known only to its executor has no `max` and is skipped.
function lengths.learn_length(request, output)
  if state.overcommits and request.max > 0 then
    local size = size_of(request.max)
    local bin = bin_of(size, output)
    add_length(request.tenant .. '\0' .. size, bin)
    add_length('\0' .. size, bin)
    likely.request = nil
  end
end

-- Returns the quantile of the output length, given the output so far; `max` while too little is known.
local function find_likely_output(request, quantile)
  local size = size_of(request.max)
  local histogram = load_histogram(request.tenant .. '\0' .. size)
  if histogram.count < MIN_COUNT then
    histogram = load_histogram('\0' .. size)
  end
  if histogram.count < MIN_COUNT then
    return request.max
  end
  local first = request.output > 0 and bin_of(size, request.output + 1) or 1
  local longer = 0
  for bin = first, NUM_BINS do
    longer = longer + (histogram.bins[bin] or 0)
  end
  if longer == 0 then
    return request.max
  end
  local left = longer
  for bin = first, NUM_BINS do
    left = left - (histogram.bins[bin] or 0)
    if left <= (1 - quantile) * longer + 1e-9 then
      return math.min(request.max, math.max(tokens_of(size, bin), request.output + 1))
    end
  end
  return request.max
end

-- As `find_likely_output`. The same request is tried on several executors in turn, so the last result is kept.
local function likely_output(request, quantile)
  if likely.request ~= request or likely.output ~= request.output or likely.quantile ~= quantile then
    likely.request, likely.output, likely.quantile = request, request.output, quantile
    likely.tokens = find_likely_output(request, quantile)
  end
  return likely.tokens
end

-- A number of blocks below which the executor has no room for the request, found without its likely output.
function lengths.least_blocks(request, executor)
  if executor.ends_at_reservation or executor.quantile >= 1 or request.max == 0 then
    return 0
  end
  return math.min(request.blocks, request.sequences * (math.ceil(request.prompt / request.block_size) + 1))
end

-- The blocks that the executor reserves for the request: to its end, for its likely output, or, where the executor ends
-- a placement at the end of its reservation, for the next placement.
function lengths.needed_blocks(request, executor)
  if executor and executor.ends_at_reservation then
    return request.placement_blocks
  end
  local quantile = executor and executor.quantile or 1
  if quantile >= 1 or request.max == 0 then
    return request.blocks
  end
  local tokens = request.prompt + likely_output(request, quantile)
  return math.min(request.blocks, request.sequences * (math.ceil(tokens / request.block_size) + 1))
end
