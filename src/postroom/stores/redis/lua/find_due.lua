-- Find tickets whose time has come, the oldest first; nothing is taken or changed.
-- ARGV: how many at most, and the last millisecond of interest or nothing. Answers tickets, each with when it ended.
local latest = string.format('%.0f', math.min(math.floor(now / 1000), tonumber(ARGV[2]) or math.huge))
return redis.call('ZRANGEBYSCORE', expiries, '-inf', latest, 'WITHSCORES', 'LIMIT', 0, ARGV[1])
