-- Forget tickets that have ended long ago, the oldest first.
-- ARGV: how many milliseconds ago, and how many at most. Answers how many were forgotten.
local latest = string.format('%.0f', math.floor(now / 1000) - ARGV[1])
local ended = redis.call('ZRANGEBYSCORE', endings, '-inf', latest, 'LIMIT', 0, ARGV[2])
for _, ticket in ipairs(ended) do
  if look(ticket) ~= OPEN then redis.call('HDEL', tickets, ticket) end
  redis.call('ZREM', endings, ticket)
end
return #ended
