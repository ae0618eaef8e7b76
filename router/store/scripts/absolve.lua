-- absolve: a suspect has brought a token: its executor may seat the next one, and what it lost before is not counted.
--
-- KEYS        the pool's keys, mailboxes
-- ARGV        [1] caller  [2] request id  [3] attempt
-- returns     {'ABSOLVED'} | {'STALE'}: it is no suspect, or not placed by this attempt
-- complexity  O(1), and that of board
-- A repeat is stale.
local id = ARGV[2]
local request = load_request(id)
if not request or request.state ~= 'PLACED' or request.attempt ~= tonumber(ARGV[3]) or request.strikes == 0 then
  return finish({'STALE'})
end
local executor = load_executor(request.executor_id)
executor.has_suspect = false
save_executor(request.executor_id, executor)
forgive(request)
save_request(id, request)
board()
return finish({'ABSOLVED'})
