-- rates: checks whether a tenant's rates allow a request now, before the router spends work on it (tokenization).
--
-- KEYS        the pool's keys
-- ARGV        [1] caller  [2] tenant  [3] request id or ''  [4] numbers, packed: milliseconds per request and burst,
--             milliseconds per token and burst, tokens of the request  [5] 1 to take from the rates, else '0'
-- returns     {'WITHIN'} | {'REFUSED', 'RATE_LIMITED', limit, milliseconds until a retry makes sense}
-- complexity  O(1)
-- Changes nothing unless [5] is 1. A request that is known or ended recently is a repeat for submit: rates do not
-- refuse it.
local name, id, takes = ARGV[2], ARGV[3], ARGV[5] == '1'
local ms_per_request, request_burst, ms_per_token, token_burst, tokens = struct.unpack('<ddddd', ARGV[4])

if id ~= '' and (load_request(id) or ended_ms(id)) then
  return finish({'WITHIN'})
end
local tenant = load_tenant(name)
local request_ms, token_ms = tenant.request_ms, tenant.token_ms
local limit, wait_ms = take_rates(tenant, ms_per_request, request_burst, ms_per_token, token_burst, tokens)
if limit then
  return finish({'REFUSED', 'RATE_LIMITED', limit, wait_ms})
end
if takes then
  save_tenant(name, tenant)
else
  tenant.request_ms, tenant.token_ms = request_ms, token_ms -- the next call finds this table
end
return finish({'WITHIN'})
