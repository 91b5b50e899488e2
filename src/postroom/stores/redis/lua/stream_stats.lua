-- Count, without looking at the messages themselves.
-- ARGV: the group. Answers how many are pending, out, delivered and dead, and for how many microseconds the oldest that
-- may go out has been due: nothing if none may.
local back, soon, all = redis.call('ZCARD', waiting), redis.call('ZCARD', delayed), redis.call('XLEN', stream)
local oldest

local function compare(at)
  if at and at <= now and (not oldest or at < oldest) then oldest = at end
end

local entry, held = unread()
if entry then compare(note_of(entry)[DUE]) end
compare(tonumber(redis.call('ZRANGE', delayed, 0, 0, 'WITHSCORES')[2]))
local names = redis.call('HGETALL', topics)
for number = 2, #names, 2 do
  local topic = struct.pack('>I2', math.min(tonumber(names[number]), 65535))
  local member = redis.call('ZRANGEBYLEX', waiting, '[' .. topic, '(' .. topic .. '\255', 'LIMIT', 0, 1)[1]
  compare(member and struct.unpack('>I8', member, 3))
end
local out = math.max(held - back, 0)
return {
  math.max(all - out, 0) + soon, out, redis.call('ZCARD', done), redis.call('XLEN', dead),
  oldest and whole(now - oldest) or '',
}
