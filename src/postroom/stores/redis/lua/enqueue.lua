-- Store messages that are not there yet.
-- ARGV: the channel that is told of it, or nothing; then for each message its id, what is stored of it, whether its
-- time is a delay, that time, its topic, its lane, its tenant and its dedupe key, both with their topic or empty.
-- Answers for each, in hexadecimal digits, the id that is there now, and before it 1 if that is new.
local SIZE = 8
local answers, added = {}, false
for first = 2, #ARGV, SIZE do
  local id, body, is_delay, time, topic, lane, tenant, dedupe = unpack(ARGV, first, first + SIZE - 1)
  local there = redis.call('HEXISTS', states, id) == 1 and id
  if not there and dedupe ~= '' then
    local same = redis.call('HGET', dedupes, dedupe)
    there = same and redis.call('HEXISTS', states, same) == 1 and same
  end
  if not there then
    local number = redis.call('HGET', topics, topic)
    if not number then
      number = redis.call('HLEN', topics)
      if number > 65535 then return redis.error_reply('LIMIT this namespace has 65,536 topics, and takes no more') end
      redis.call('HSET', topics, topic, number)
    end
    -- Rising, and the time of its arrival at once: two of the same microsecond differ by one.
    local seq = math.max((tonumber(redis.call('HGET', counters, 'seq')) or 0) + 1, now)
    redis.call('HSET', counters, 'seq', string.format('%.0f', seq))
    local at = is_delay == '1' and now + time or tonumber(time)
    local state = { PENDING, 0, 0, at, 0, now, seq, tonumber(number), lane, tenant, '', dedupe }
    redis.call('HSET', entries, id, body)
    write(id, state)
    if dedupe ~= '' then redis.call('HSET', dedupes, dedupe, id) end
    if lane ~= '' then redis.call('ZADD', lanes, 0, by_seq(id, state)) end
    offer(id, state)
    added = true
  end
  local answer = (there or id):gsub('.', function(byte) return string.format('%02x', byte:byte()) end)
  answers[#answers + 1] = (there and '0' or '1') .. answer
end
if added and ARGV[1] ~= '' then redis.call('PUBLISH', ARGV[1], '') end
return answers
