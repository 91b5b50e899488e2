-- Record what became of claims.
-- ARGV: whether delivered messages are kept; then for each claim its id, its token, what became of it (d delivered,
-- r to be tried again, x dead, e given back), after which delay, and the error.
-- Answers the numbers of the claims that were lost, about which nothing was recorded; the first is 1.
local AFTER = { d = DELIVERED, r = PENDING, x = DEAD, e = PENDING }
local keeps, lost = ARGV[1] == '1', {}

local function deliver(id, state)
  withdraw(id, state)
  redis.call('ZREM', leased, id)
  redis.call('ZREM', dead, id)
  local lane = state[LANE]
  if keeps then
    redis.call('HDEL', errors, id)
    state[STATUS], state[UNTIL], state[WORKER] = DELIVERED, 0, ''
    write(id, state)
    redis.call('ZADD', done, now, id)
  end
  if lane ~= '' then
    redis.call('ZREM', lanes, by_seq(id, state))
    redis.call('ZREM', tombs, by_seq(id, state))
  end
  if not keeps then forget(id, state) end
  promote(lane)
end

for first = 2, #ARGV, 5 do
  local id, token, outcome, delay, reason = unpack(ARGV, first, first + 4)
  local state = read(id)
  if not state then
    -- Only delivered messages are ever deleted.
    if outcome ~= 'd' then lost[#lost + 1] = (first - 2) / 5 + 1 end
  elseif state[TOKEN] ~= tonumber(token) then
    lost[#lost + 1] = (first - 2) / 5 + 1
  elseif state[STATUS] ~= LEASED and not (state[STATUS] == DEAD and outcome == 'd') then
    -- It was settled before: in this way, which is no loss, or in another.
    if state[STATUS] ~= AFTER[outcome] then lost[#lost + 1] = (first - 2) / 5 + 1 end
  elseif outcome == 'd' then
    deliver(id, state)
  elseif outcome == 'x' then
    bury(id, state, reason)
  else
    local wait = tonumber(delay)
    if outcome == 'r' then
      redis.call('HSET', errors, id, reason)
      state[DUE] = now + wait
    else
      state[ATTEMPTS] = state[ATTEMPTS] - 1
      if wait > 0 then state[DUE] = now + wait end
    end
    redis.call('ZREM', leased, id)
    state[STATUS], state[UNTIL], state[WORKER] = PENDING, 0, ''
    write(id, state)
    if state[ATTEMPTS] > 0 then redis.call('ZADD', tried, state[ATTEMPTS], id) end
    offer(id, state)
  end
end
return lost
