-- Adapters: a filter and a preference for the executors that serve a request's adapter: which adapters an executor serves,
-- and which are pinned there.
--
-- A placement pins its adapter on its executor from the reservation until it ends. An executor never has more pinned
-- adapters than slots, so what runs there is always resident. `pins` counts the placements of each pinned adapter. In
-- the key `adapters` is, for each executor with slots, what it serves: of each adapter a space, the hash, and '+' if it
-- was resident at the last report, else '-'. A request without an adapter reads none of this.
local served = {} -- executor -> what it serves, of those looked up in this call

at_begin(function()
  if next(served) then served = cleared(served) end
end)

function adapters.served_on(executor_id)
  if served[executor_id] == nil then
    served[executor_id] = redis.call('HGET', ADAPTERS, executor_id) or ''
  end
  return served[executor_id]
end

-- Sets what the executor serves.
function adapters.set_served(executor, num_slots, text)
  if num_slots > 0 then
    if served[executor.id] ~= text then
      redis.call('HSET', ADAPTERS, executor.id, text)
    end
  elseif executor.num_adapter_slots > 0 then
    redis.call('HDEL', ADAPTERS, executor.id)
  end
  executor.num_adapter_slots, served[executor.id] = num_slots, text
end

function adapters.serves(executor, adapter)
  return executor.num_adapter_slots > 0 and adapters.served_on(executor.id):find(' ' .. adapter .. '[+-]') ~= nil
end

local function is_resident(executor, adapter)
  return adapters.served_on(executor.id):find(' ' .. adapter .. '+', 1, true) ~= nil
end

function adapters.pins_of(executor)
  return executor.pins ~= '' and cmsgpack.unpack(executor.pins) or {}
end

-- Adds a placement to the pins of its adapter (`sign` 1), or removes it (-1).
function adapters.count_pin(executor, adapter, sign)
  local pins = adapters.pins_of(executor)
  local count = (pins[adapter] or 0) + sign
  pins[adapter] = count > 0 and count or nil
  executor.pins = next(pins) and cmsgpack.pack(pins) or ''
end

-- Whether the executor serves the adapter, and it is in `pins` or a slot is left.
function adapters.may_pin(executor, adapter, pins)
  if not adapters.serves(executor, adapter) then
    return false
  elseif pins[adapter] then
    return true
  end
  local num_pinned = 0
  for _ in pairs(pins) do
    num_pinned = num_pinned + 1
  end
  return num_pinned < executor.num_adapter_slots
end

-- What the executor has to do before it can use the adapter: 0 nothing, 1 load it into an empty slot, 2 evict another.
function adapters.loading_rank(executor, adapter)
  local pins = adapters.pins_of(executor)
  if pins[adapter] or is_resident(executor, adapter) then
    return 0
  end
  local _, num_used = adapters.served_on(executor.id):gsub('%+', '')
  for pinned in pairs(pins) do
    num_used = num_used + (is_resident(executor, pinned) and 0 or 1)
  end
  return num_used < executor.num_adapter_slots and 1 or 2
end

-- Returns whether the executor may take the request: it serves its adapter, and has it pinned or has a slot left.
function adapters.allows(request, executor)
  return request.adapter == '' or adapters.may_pin(executor, request.adapter, adapters.pins_of(executor))
end
