-- Count, without looking at the messages themselves.
-- Answers how many are pending, out, delivered and dead, and for how many microseconds the oldest has been waiting that
-- may go out now or is parked: nothing if none does. Of those parked, which are sorted by destination, some are looked at.
local LOOKED_AT = 1000
local out, delivered, buried = redis.call('ZCARD', leased), redis.call('ZCARD', done), redis.call('ZCARD', dead)
local oldest
for _, topic in ipairs(topics_with_heads(due)) do
  local to = '(' .. struct.pack('>I2I8', topic, now + 1)
  local member = redis.call('ZRANGEBYLEX', due, '[' .. struct.pack('>I2', topic), to, 'LIMIT', 0, 1)[1]
  local at = member and struct.unpack('>I8', member, 3)
  if at and (not oldest or at < oldest) then oldest = at end
end
local members = redis.call('ZRANGE', parked, 0, LOOKED_AT - 1)
for place, member in ipairs(members) do members[place] = member:sub(-16) end
for _, packed in ipairs(#members > 0 and redis.call('HMGET', states, unpack(members)) or {}) do
  local state = packed and cmsgpack.unpack(packed)
  if state and is_parked(state) and (not oldest or state[SEQ] < oldest) then oldest = state[SEQ] end
end
local all = redis.call('HLEN', states)
return { all - out - delivered - buried, out, delivered, buried, oldest and string.format('%.0f', math.max(now - oldest, 0)) or '' }
