-- Find tickets whose time has come, the oldest first; nothing is taken or changed.
-- ARGV: how many at most. Answers tickets, each with when it ended.
local latest = string.format('%.0f', math.floor(now / 1000))
return redis.call('ZRANGEBYSCORE', expiries, '-inf', latest, 'WITHSCORES', 'LIMIT', 0, ARGV[1])
