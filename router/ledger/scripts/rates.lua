-- rates: checks whether a tenant's rates allow a request now, before the router spends work on it (tokenization).
--
-- KEYS        the pool's keys
-- ARGV        [1] caller  then the fields of RATES (codec.py): `id` is of the request or '', `tokens` are those of the
--             request
-- returns     {'WITHIN'} | {'REFUSED', 'RATE_LIMITED', limit, milliseconds until a retry makes sense}
-- complexity  O(1)
-- Changes nothing unless `takes`. A request that is known or ended recently is a repeat for submit: rates do not
-- refuse it.

local function run()
  local asked = {}
  read_rates(asked, 2)

  if asked.id ~= '' and (load_request(asked.id) or states.ended_ms(asked.id)) then
    return reply.finish({'WITHIN'})
  end
  local tenant = load_tenant(asked.tenant)
  local request_ms, token_ms = tenant.request_ms, tenant.token_ms
  local limit, wait_ms = tenants.take_rates(tenant, asked, asked.tokens)
  if limit then
    return reply.finish({'REFUSED', 'RATE_LIMITED', limit, wait_ms})
  end
  if asked.takes then
    save_tenant(asked.tenant, tenant)
  else
    tenant.request_ms, tenant.token_ms = request_ms, token_ms -- the next call finds this table
  end
  return reply.finish({'WITHIN'})
end

script('rates', run, {})
