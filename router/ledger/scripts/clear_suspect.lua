-- clear_suspect: clears a suspect that has produced a token: its executor may seat another one, and its earlier
-- failures no longer count.
--
-- KEYS        the pool's keys, mailboxes
-- ARGV        [1] caller  [2] request id  [3] attempt
-- returns     {'CLEARED'} | {'STALE'}: it is no suspect, or not placed by this attempt
-- complexity  O(1), and that of board
-- A repeated call returns STALE.

local function run()
  local id = ARGV[2]
  local request = load_request(id)
  if not request or request.state ~= 'PLACED' or request.attempt ~= tonumber(ARGV[3]) or request.failures == 0 then
    return reply.finish({'STALE'})
  end
  local executor = load_executor(request.executor_id)
  executor.has_suspect = false
  save_executor(request.executor_id, executor)
  states.clear_failures(request)
  save_request(id, request)
  board.run()
  return reply.finish({'CLEARED'})
end

script('clear_suspect', run, {'allow-oom'})
