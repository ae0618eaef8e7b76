-- Suspects: a filter that keeps two suspects apart: one of them could crash the other.

-- Returns whether the executor may take the request: not both are suspect.
function suspects.allows(request, executor)
  return request.failures == 0 or not executor.has_suspect
end
