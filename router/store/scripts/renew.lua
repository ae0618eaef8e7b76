-- renew: renews the caller's lease, returns the living routers and the load.
--
-- KEYS        the pool's keys
-- ARGV        [1] caller
-- returns     {'RENEWED', {router, …}, waiting requests, executors, executors with an open seat}; at most 256 routers
-- complexity  O(log R + 256) for R routers
--@flags allow-oom
register()
return finish({
  'RENEWED', redis.call('ZRANGEBYSCORE', ROUTERS, '(0', '+inf', 'LIMIT', 0, 256), state.waiting,
  redis.call('ZCARD', REPORTS), redis.call('ZCARD', ROOM),
})
