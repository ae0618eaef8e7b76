-- Owners: the living routers, and the events that notify them of their requests.

-- Renews the caller's lease. Only `reap` ends one, and marks it with 0 before it removes the router's waiting requests.
function owners.register()
  local until_ms = kept.leases[CALLER] or tonumber(redis.call('ZSCORE', ROUTERS, CALLER) or 0)
  if until_ms == 0 then
    registered = 1
  end
  if until_ms - NOW < LEASE_MS - 250 then -- not with every call
    until_ms = NOW + LEASE_MS
    redis.call('ZADD', ROUTERS, string.format('%d', until_ms), CALLER)
  end
  kept.leases[CALLER] = until_ms
  kept.living[CALLER] = true
end

-- Whether the caller has given up the call, at `until_ms`; '' is never. Then its client asks another router, and a late
-- call from a stalled connection must not take the request from that router.
function owners.is_late(until_ms)
  return NOW > (tonumber(until_ms) or math.huge)
end

-- Whether the router has a lease. '' owns what only an executor knew.
function owners.lives(owner)
  if owner == CALLER or owner == '' then
    return owner == CALLER
  elseif kept.living[owner] == nil then
    local until_ms = redis.call('ZSCORE', ROUTERS, owner)
    kept.living[owner] = until_ms ~= false and tonumber(until_ms) > 0
  end
  return kept.living[owner]
end

local mailboxes = {} -- router -> key, false if it was not passed, of those looked up in this call
local mail = {} -- of this call, by mailbox

at_begin(function()
  if next(mailboxes) then mailboxes = cleared(mailboxes) end
  if next(mail) then mail = cleared(mail) end
end)

local function mailbox_of(owner)
  if mailboxes[owner] == nil then
    local key = EXECUTORS:sub(1, -1 - #'executors') .. 'mailbox:' .. owner
    mailboxes[owner] = false
    for i = NUM_POOL_KEYS + 1, #KEYS do
      if KEYS[i] == key then
        mailboxes[owner] = key
        break
      end
    end
  end
  return mailboxes[owner]
end

-- Whether `notify` can notify the owner. Checked before anything about its request is changed.
function owners.reachable(owner)
  if owner == CALLER or not owners.lives(owner) or mailbox_of(owner) then
    return true
  end
  for _, name in ipairs(missing) do
    if name == owner then
      return false
    end
  end
  missing[#missing + 1] = owner
  return false
end

-- Notifies the request's owner if it is alive: the caller by this call's reply, other routers by mailbox.
function owners.notify(kind, id, request)
  local fields = {
    'kind', kind, 'request_id', id, 'attempt', request.attempt,
    'executor_id', request.executor_id, 'generation', request.generation, 'blocks', request.reserved,
    'suspect', request.failures > 0 and '1' or '0', 'at_ms', NOW_TEXT,
  }
  if request.adapter ~= '' then
    fields[#fields + 1], fields[#fields + 2] = 'adapter', request.adapter
  end
  if request.owner == CALLER then
    events[#events + 1] = fields
  elseif owners.lives(request.owner) then
    local mailbox = mailbox_of(request.owner)
    mail[mailbox] = mail[mailbox] or {}
    table.insert(mail[mailbox], fields)
  end
end

-- A mailbox that is deleted by hand may remain without a time to live for as long as the last one is trusted.
function owners.send_mail()
  for mailbox, entries in pairs(mail) do
    for _, fields in ipairs(entries) do
      redis.call('XADD', mailbox, 'MAXLEN', '~', MAILBOX_ENTRIES, '*', unpack(fields))
    end
    if NOW - (kept.mailed[mailbox] or 0) > MAILBOX_MS / 10 then
      redis.call('PEXPIRE', mailbox, MAILBOX_MS)
      kept.mailed[mailbox] = NOW
    end
  end
end
