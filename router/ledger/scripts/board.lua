-- board: places waiting requests. Continues where an earlier call stopped at its bound or at an unknown mailbox.
--
-- KEYS        the pool's keys, mailboxes
-- ARGV        [1] caller
-- returns     {'DONE'}
-- complexity  O(MAX_HEADS · (log N + MAX_CANDIDATES)) for N waiting

local function run()
  board.run()
  return reply.finish({'DONE'})
end

script('board', run, {'allow-oom'})
