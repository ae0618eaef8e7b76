-- Fits: a filter and the blocks to reserve: whether the executor has room for the request.

-- Returns whether the executor has a sequence for each choice, and perhaps the blocks.
function fits.allows(request, executor)
  return executor.budget_sequences - executor.reserved_sequences >= request.sequences
    and available_blocks(executor) >= lengths.least_blocks(request, executor)
end

-- Returns the blocks to reserve for the request if there is room for them, else nil.
function fits.blocks(request, executor)
  local blocks = lengths.needed_blocks(request, executor)
  return available_blocks(executor) >= blocks and blocks or nil
end

-- Returns whether the executor, if empty, would hold this much.
function fits.would_hold(executor, request)
  return executor.total_blocks >= request.blocks and executor.budget_sequences >= request.sequences
end
