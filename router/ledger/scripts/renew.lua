-- renew: renews the caller's lease, returns the living routers.
--
-- KEYS        the pool's keys
-- ARGV        [1] caller
-- returns     {'RENEWED', {router, …}}; at most 256 routers
-- complexity  O(log R + 256) for R routers

local function run()
  owners.register()
  return reply.finish({'RENEWED', redis.call('ZRANGEBYSCORE', ROUTERS, '(0', '+inf', 'LIMIT', 0, 256)})
end

script('renew', run, {'allow-oom'})
