-- Record what became of claims.
-- ARGV: whether delivered messages are kept; then in one word claims that were delivered, of each its id in 16 bytes and
-- its token in 8; then in five words each other claims: id, token, what became of it (d delivered, r to be tried again,
-- x dead, e given back, k parked), after which delay, and the error, or the destination that it is parked for.
-- Answers the numbers of the claims that were lost, about which nothing was recorded; the first is 1.
local AFTER = { d = DELIVERED, r = PENDING, x = DEAD, e = PENDING, k = PENDING }
local TOLD, SIZE = 24, 5
local keeps, lost = ARGV[1] == '1', {}

local function deliver(id, state)
  local lane = state[LANE]
  later('ZREM', state[STATUS] == DEAD and dead or leased, id)
  if keeps then
    if state[ATTEMPTS] > 1 or state[STATUS] == DEAD then later('HDEL', errors, id) end
    state[STATUS], state[UNTIL], state[WORKER], state[CHANGED] = DELIVERED, 0, '', now
    later('HSET', states, id, cmsgpack.pack(state))
    later('ZADD', done, string.format('%.0f', now), id)
  end
  if lane ~= '' then
    redis.call('ZREM', lanes, by_seq(id, state))
    redis.call('ZREM', tombs, by_seq(id, state))
    promote(lane)
  end
  if not keeps then forget(id, state) end
end

-- Have a message pending again.
local function give_back(id, state)
  if state[ATTEMPTS] > 0 then later('ZADD', tried, state[ATTEMPTS], id) end
  state[STATUS], state[UNTIL], state[WORKER], state[CHANGED] = PENDING, 0, '', now
  if state[LANE] == '' then
    later('HSET', states, id, cmsgpack.pack(state))
    later('ZADD', due, 0, by_due(id, state))
  else
    write(id, state)
    offer(id, state)
  end
  later('ZREM', leased, id)
end

-- Settle one claim; tell whether it was still this one's to settle.
local function settle(id, state, token, outcome, delay, reason)
  if not state then return outcome == 'd' end -- only delivered messages are ever deleted
  if state[TOKEN] ~= token then return false end
  if state[STATUS] ~= LEASED and not (state[STATUS] == DEAD and outcome == 'd') then
    return state[STATUS] == AFTER[outcome] -- it was settled before: in this way, which is no loss, or in another
  end
  if outcome == 'd' then
    deliver(id, state)
  elseif outcome == 'x' then
    bury(id, state, reason)
  elseif outcome == 'r' then
    later('HSET', errors, id, reason)
    state[DUE] = now + delay
    give_back(id, state)
  else
    state[ATTEMPTS] = state[ATTEMPTS] - 1
    if delay > 0 then state[DUE] = now + delay end
    if outcome == 'k' then
      state[PARKED], state[DESTINATION] = token, reason
      later('ZADD', parked, 0, by_parked(id, state))
    end
    give_back(id, state)
  end
  return true
end

local delivered = #ARGV[2] / TOLD
local ids, settled = {}, {}
for first = 1, #ARGV[2], TOLD do ids[#ids + 1] = ARGV[2]:sub(first, first + 15) end
for first = 3, #ARGV, SIZE do ids[#ids + 1] = ARGV[first] end
if #ids == 0 then return lost end
local found = redis.call('HMGET', states, unpack(ids))
for place, id in ipairs(ids) do
  local token, outcome, delay, reason
  if place <= delivered then
    token, outcome = struct.unpack('>I8', ARGV[2], place * TOLD - 7), 'd'
  else
    token, outcome, delay, reason = unpack(ARGV, (place - delivered - 1) * SIZE + 4, (place - delivered) * SIZE + 2)
  end
  local state = found[place] and cmsgpack.unpack(found[place])
  if settled[id] then -- in this very call, so that it is read anew
    flush()
    state = read(id)
  end
  settled[id] = true
  if not settle(id, state, tonumber(token), outcome, tonumber(delay), reason) then lost[#lost + 1] = place end
end
flush()
return lost
