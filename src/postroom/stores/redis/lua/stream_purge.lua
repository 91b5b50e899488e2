-- Delete the receipts of messages that were delivered long ago, the oldest first.
-- ARGV: the group, how long ago, and how many at most. Answers how many were deleted, and how many were looked at.
local entries = redis.call('ZRANGEBYSCORE', done, '-inf', whole(now - ARGV[2]), 'LIMIT', 0, ARGV[3])
for _, entry in ipairs(entries) do
  redis.call('ZREM', done, entry)
  redis.call('HDEL', receipts, entry)
end
return { #entries, #entries }
