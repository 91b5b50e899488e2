-- Store messages that are not due yet; a claim moves them into the stream when they are.
-- ARGV: the group, which matters not here; then for each message whether its time is a delay, that time, how many words
-- its fields have, and these.
local first = 2
while first <= #ARGV do
  local at = ARGV[first] == '1' and now + ARGV[first + 1] or tonumber(ARGV[first + 1])
  local size = tonumber(ARGV[first + 2])
  local record = { now }
  for number = first + 3, first + 2 + size do record[#record + 1] = ARGV[number] end
  local member = struct.pack('>I8', redis.call('HINCRBY', counters, 'delayed', 1))
  redis.call('HSET', later, member, cmsgpack.pack(record))
  redis.call('ZADD', delayed, whole(at), member)
  first = first + 3 + size
end
