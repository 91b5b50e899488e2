-- Tell for which destinations messages are parked, in ascending order.
-- ARGV: the destination after which to begin, and how many. Answers whether there is more to look through, and then the
-- destinations; members that belong to no parked message any more are removed.
local LOOKED_AT = 2000
local last, limit = ARGV[1], tonumber(ARGV[2])
local answer, looked = { 0 }, 0
while #answer <= limit do
  if looked == LOOKED_AT then
    answer[1] = 1
    break
  end
  looked = looked + 1
  -- A destination ends with a zero byte, so whatever begins with it and a one comes after all of its members.
  local member = redis.call('ZRANGEBYLEX', parked, '[' .. last .. '\1', '+', 'LIMIT', 0, 1)[1]
  if not member then break end
  local id = member:sub(-16)
  local state = read(id)
  if state and is_parked(state) and by_parked(id, state) == member then
    last = member:sub(1, -PARKED_TAIL - 1)
    answer[#answer + 1] = last
  else
    redis.call('ZREM', parked, member)
  end
end
return answer
