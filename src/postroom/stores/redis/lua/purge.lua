-- Delete messages that were delivered long ago, the oldest first.
-- ARGV: how long ago, and how many at most. Answers how many were deleted.
local latest = string.format('%.0f', now - ARGV[1])
local ids = redis.call('ZRANGEBYSCORE', done, '-inf', latest, 'LIMIT', 0, ARGV[2])
for _, id in ipairs(ids) do
  local state = read(id)
  later('ZREM', done, id)
  if state and state[STATUS] == DELIVERED then forget(id, state) end
end
flush()
return #ids
