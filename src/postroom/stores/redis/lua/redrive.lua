-- Have dead messages tried again from their first attempt on, at once; those of their keys wait behind them again.
-- ARGV: the ids. Answers how many were dead.
local count = 0
for _, id in ipairs(ARGV) do
  local state = read(id)
  if state and state[STATUS] == DEAD then
    count = count + 1
    local lane = state[LANE]
    local before = lane ~= '' and head(lane)
    local other = before and read(before)
    if other and other[STATUS] == PENDING then withdraw(before, other) end
    state[STATUS], state[ATTEMPTS], state[DUE] = PENDING, 0, now
    write(id, state)
    redis.call('ZREM', dead, id)
    redis.call('HDEL', errors, id)
    if lane ~= '' then
      redis.call('ZREM', tombs, by_seq(id, state))
      redis.call('ZADD', lanes, 0, by_seq(id, state))
      promote(lane)
    else
      offer(id, state)
    end
  end
end
return count
