-- Fullness: a rule that prefers the emptier executor. The more there is on an executor, the slower are its steps and the
-- sooner it evicts a prefix that is to be used again.
--
-- parameters  WEIGHT: the price of a full executor, as a multiple of the time to compute all of the prompt; a half full one
--             costs half. MAX_IMBALANCE: how much fuller, as a share of its blocks or sequences, an executor with the
--             adapter may be, or the holder of a prefix whose speed is not known
fullness.WEIGHT = 2
fullness.MAX_IMBALANCE = 0.25

-- Returns the share of the executor's blocks or sequences that is reserved.
function fullness.of(executor)
  return math.max(
    executor.reserved_blocks / math.max(1, executor.budget_blocks),
    executor.reserved_sequences / math.max(1, executor.budget_sequences))
end

-- Returns the price of the executor for the request, in tokens.
function fullness.cost(request, executor)
  return fullness.WEIGHT * fullness.of(executor) * (request.prompt + request.output)
end

-- Returns whether the executor is much fuller than another.
function fullness.is_much_fuller(executor, other)
  return fullness.of(executor) > fullness.of(other) + fullness.MAX_IMBALANCE
end
