-- Reply: how a script ends.

-- Ends a script that only reads.
function reply.answer(outcome)
  for name in pairs(new_tenants) do
    known_tenants[name] = nil
  end
  keep()
  return {outcome, events, missing, more, registered, NOW}
end

-- Writes what was changed; ends every other script.
function reply.finish(outcome)
  tenants.list_tenants()
  flush_requests()
  flush_executors()
  flush_tenants()
  lengths.flush_histograms()
  flush_prefixes()
  for i = 1, #written_keys do
    flush_writes(written_keys[i])
  end
  for i = #written_keys, 1, -1 do -- all are written
    written_keys[i] = nil
  end
  owners.send_mail()
  state.version = state.version + 1
  kept.state, kept.text = state, pack_state(state)
  redis.call('SET', STATE, kept.text)
  return reply.answer(outcome)
end
