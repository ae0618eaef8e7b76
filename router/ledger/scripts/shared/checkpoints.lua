-- Checkpoints: which prefixes can be used on executors whose model has recurrent layers. There the KV of a prefix is of use
-- only if the executor keeps the state at its end as well. Requests for such a model name the prefixes at whose ends an
-- executor may keep it, each as `name:tokens`.
--
-- In the key `checkpoints` is, for each such executor, what it kept at its last report: '+' if that was more than it
-- reports, of each prefix a space and the name, and a space. A request for another model reads none of this.
--
-- parameters  REPORT_MS: how long it may take from the computed prompt to the report that lists its checkpoints. Until then
--             they count as kept, so that prompts which come at once, as those of a fork, find each other.
checkpoints.REPORT_MS = 3000
local kept_on = {} -- executor -> what it keeps, of those looked up in this call

at_begin(function()
  if next(kept_on) then kept_on = cleared(kept_on) end
end)

local function load(executor_id)
  if kept_on[executor_id] == nil then
    kept_on[executor_id] = redis.call('HGET', CHECKPOINTS, executor_id) or ''
  end
  return kept_on[executor_id]
end

-- Sets what the executor keeps; '' if it does not report that, as without recurrent layers, or is gone.
function checkpoints.set_kept(executor_id, text)
  if text == '' then
    redis.call('HDEL', CHECKPOINTS, executor_id)
  elseif load(executor_id) ~= text then
    redis.call('HSET', CHECKPOINTS, executor_id, text)
  end
  kept_on[executor_id] = text
end

-- Returns until when the checkpoints of a prompt that was just placed on the executor count as kept.
function checkpoints.due_ms(executor)
  return math.max(NOW, executor.prefilled_ms) + checkpoints.REPORT_MS
end

-- Returns whether the executor keeps the state of a prefix, `name:tokens`, of a prompt whose checkpoints are due at that
-- time.
function checkpoints.has(executor_id, prefix_name, due_ms)
  if NOW <= due_ms then
    return true
  end
  local kept = load(executor_id)
  return kept == '' or kept:sub(1, 1) == '+' or kept:find(' ' .. prefix_name:match('^[^:]*') .. ' ', 1, true) ~= nil
end
