-- submit: puts a request in line and seats it in the same call where its turn has come and it fits.
--
-- KEYS        the pool's keys, mailboxes
-- ARGV        [1] caller, who owns the request  [2] request id  [3] class, 1 first  [4] milliseconds until its
--             deadline, '' for none  [5] blocks  [6] sequences  [7] last attempt known  [8] most that may wait
-- returns     {'PLACED', attempt, executor, generation} | {'QUEUED', number ahead}
--             | {'REFUSED', 'NO_EXECUTOR' | 'NEVER_FITS' | 'QUEUE_FULL'} | {'DUPLICATE', state} | {'AGAIN'}
-- complexity  that of board
-- A repeat by the owner with the same arguments changes nothing and returns how the request stands.
local id, class, deadline_in_ms = ARGV[2], tonumber(ARGV[3]), ARGV[4]
local blocks, sequences = tonumber(ARGV[5]), tonumber(ARGV[6])
local last_attempt, max_waiting = tonumber(ARGV[7]), tonumber(ARGV[8])

local function duplicate_of(known)
  local same = known.owner == CALLER and known.class == class and known.deadline_in_ms == deadline_in_ms
    and known.blocks == blocks and known.sequences == sequences
  if same and known.state ~= 'LOST' then
    return standing(id, known)
  end
  return {'DUPLICATE', known.state}
end

local function refusal()
  local newest = redis.call('ZREVRANGE', REPORTS, 0, 0, 'WITHSCORES')
  if #newest == 0 or NOW - tonumber(newest[2]) > LEASE_MS then
    return 'NO_EXECUTOR'
  end
  if not fits_somewhere(blocks, sequences) then
    return 'NEVER_FITS'
  end
  return nil
end

local function num_waiting()
  return redis.call('ZCARD', WAITING[1]) + redis.call('ZCARD', WAITING[2]) + redis.call('ZCARD', WAITING[3])
end

register()
local known = load_request(id)
if known then
  return finish(duplicate_of(known))
end
if ended_ms(id) then
  return finish({'DUPLICATE', 'ENDED'})
end
local reason = refusal()
if reason then
  return finish({'REFUSED', reason})
end

local request = {
  owner = CALLER, class = class, blocks = blocks, sequences = sequences, deadline_in_ms = deadline_in_ms,
  deadline_ms = deadline_in_ms == '' and NO_DEADLINE_MS or NOW + tonumber(deadline_in_ms),
  arrival = redis.call('INCR', ARRIVALS), attempt = last_attempt, rejections = 0,
}
if not somebody_waits() then -- then it need not stand in line first: half the work in the usual case
  local executor_id = choose(blocks, sequences)
  if executor_id then
    seat(id, request, executor_id, last_attempt + 1)
    return finish(standing(id, request))
  end
end
enqueue(id, request)
board()
request = load_request(id)
local is_undecided = #missing > 0 -- seats ahead of it could not be given
if request.state == 'WAITING' and (is_undecided or num_waiting() > max_waiting) then
  withdraw(id, request)
  redis.call('HDEL', REQUESTS, id)
  return finish(is_undecided and {'AGAIN'} or {'REFUSED', 'QUEUE_FULL'})
end
return finish(standing(id, request))
