-- snapshot: the pool at one moment, for people and gauges.
--
-- KEYS        the pool's keys
-- ARGV        [1] caller
-- returns     {'SNAPSHOT', JSON}: executors with how they stand, requests and tokens that wait per class, how true
--             estimates were
-- complexity  O(E) for E executors
local found, names = {}, redis.call('HKEYS', EXECUTORS)
table.sort(names)
for i, id in ipairs(names) do
  local executor = load_executor(id)
  found[i] = {
    executor_id = id, generation = executor.generation, budget_blocks = executor.budget_blocks,
    total_blocks = executor.total_blocks, budget_sequences = executor.budget_sequences,
    reserved_blocks = executor.reserved_blocks, reserved_sequences = executor.reserved_sequences,
    accepting = executor.accepting, live = NOW - executor.last_report_ms <= SILENT_MS,
  }
end
local queues = {}
for class = 1, NUM_CLASSES do
  queues[class] = {redis.call('ZCARD', KEYS[WAITING + class]), state.tokens[class]}
end
return finish({'SNAPSHOT', cjson.encode({
  executors = found, queues = queues, estimates = {state.num_estimates, state.error, state.correction},
})})
