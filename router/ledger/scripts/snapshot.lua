-- snapshot: the state of the pool at one moment, for statistics and metrics.
--
-- KEYS        the pool's keys
-- ARGV        [1] caller  [2] most tenants' queues to return; 0 if left out
-- returns     {'SNAPSHOT', JSON}: executors with their state, waiting requests and tokens per class, the quality of
--             estimates; for each tenant's queue: class, tenant, requests, tokens, milliseconds that its head has
--             waited
-- complexity  O(E + L · log N) for E executors and L tenants' queues
-- Tenants' queues in order of class and tenant; those of a class are contiguous.
local function tenant_queues(most)
  local found_queues = {}
  for class = 1, NUM_CLASSES do
    local from = '-'
    while #found_queues < most do
      local member = redis.call('ZRANGEBYLEX', KEYS[WAITING + class], from, '+', 'LIMIT', '0', '1')[1]
      if not member then
        break
      end
      local name = member:match('^[^%z]*')
      local tenant, request = load_tenant(name), load_request(states.id_of_member(name, member))
      found_queues[#found_queues + 1] = {
        class, name, tenant.waiting_by_class[class], tenant.tokens[class], request and NOW - request.since_ms or 0,
      }
      from = '(' .. name .. '\1'
    end
  end
  return found_queues
end

local function run()
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
  return reply.answer({'SNAPSHOT', cjson.encode({
    executors = found, queues = queues, estimates = {state.num_estimates, state.error, state.correction},
    tenant_queues = tenant_queues(tonumber(ARGV[2] or '0')),
  })})
end

script('snapshot', run, {'no-writes'})
