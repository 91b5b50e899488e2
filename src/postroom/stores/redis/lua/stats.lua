-- Count, without looking at the messages themselves.
-- Answers how many are pending, out, delivered and dead, and for how many microseconds the oldest that may go out has
-- been due: nothing if none may.
local out, delivered, buried = redis.call('ZCARD', leased), redis.call('ZCARD', done), redis.call('ZCARD', dead)
local oldest
local names = redis.call('HGETALL', topics)
for number = 2, #names, 2 do
  for _, key in ipairs({ due, held }) do
    local topic = tonumber(names[number])
    local to = '(' .. struct.pack('>I2I8', topic, now + 1)
    local member = redis.call('ZRANGEBYLEX', key, '[' .. struct.pack('>I2', topic), to, 'LIMIT', 0, 1)[1]
    local at = member and struct.unpack('>I8', member, 3)
    if at and (not oldest or at < oldest) then oldest = at end
  end
end
local all = redis.call('HLEN', states)
return { all - out - delivered - buried, out, delivered, buried, oldest and string.format('%.0f', now - oldest) or '' }
