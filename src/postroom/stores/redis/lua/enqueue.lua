-- Store messages that are not there yet.
-- ARGV: the channel that is told of it, or nothing; then for each message its id, what is stored of it, whether its
-- time is a delay, that time, its topic, its lane, its tenant and its dedupe key, the last three empty if there is none.
-- Answers for each a 1 if it is new, or in hexadecimal digits the id of the one that is there.
local SIZE = 8
local answers, is_new, new_dedupes, numbers = {}, {}, {}, {}
local count = (#ARGV - 1) / SIZE

-- What could be refused comes before the first write.
local known = redis.call('HLEN', topics)
for first = 2, #ARGV, SIZE do
  local topic = ARGV[first + 4]
  if not numbers[topic] then
    numbers[topic] = redis.call('HGET', topics, topic)
    if not numbers[topic] then
      numbers[topic] = known
      later('HSET', topics, topic, known)
      known = known + 1
    end
  end
end
if known > 65536 then return redis.error_reply('LIMIT this namespace has 65,536 topics, and takes no more') end

-- Which message is there already, by its id or by its dedupe key.
local function found(id, dedupe)
  if is_new[id] or redis.call('HEXISTS', states, id) == 1 then return id end
  if dedupe == '' then return nil end
  local same = new_dedupes[dedupe] or redis.call('HGET', dedupes, dedupe)
  return same and (is_new[same] or redis.call('HEXISTS', states, same) == 1) and same or nil
end

-- A place in the order of arrival rises, and is the time at once: those of one microsecond differ by one.
local before = redis.call('HMGET', counters, 'seq', 'offered')
local seq = math.max((tonumber(before[1]) or 0) + 1, now)
local offered = string.format('%.0f', (tonumber(before[2]) or 0) + count)
redis.call('HSET', counters, 'seq', string.format('%.0f', seq + count - 1), 'offered', offered)
local duplicates = 0
for first = 2, #ARGV, SIZE do
  local id, body, is_delay, time, topic, lane, tenant, dedupe = unpack(ARGV, first, first + SIZE - 1)
  local there = found(id, dedupe)
  if there then
    duplicates = duplicates + 1
    answers[#answers + 1] = there:gsub('.', function(byte) return string.format('%02x', byte:byte()) end)
  else
    local at = is_delay == '1' and now + time or tonumber(time)
    local state = { PENDING, 0, 0, at, 0, now, seq, tonumber(numbers[topic]), lane, tenant, '', dedupe }
    is_new[id], answers[#answers + 1] = true, '1'
    later('HSET', entries, id, body)
    if dedupe ~= '' then
      new_dedupes[dedupe] = id
      later('HSET', dedupes, dedupe, id)
    end
    if lane == '' then
      later('HSET', states, id, cmsgpack.pack(state))
      later('ZADD', due, 0, by_due(id, state))
    else
      write(id, state)
      redis.call('ZADD', lanes, 0, by_seq(id, state))
      offer(id, state)
    end
  end
  seq = seq + 1
end
flush()
if duplicates > 0 then redis.call('HINCRBY', counters, 'duplicates', duplicates) end
-- A hint: who may not publish has stored its messages all the same.
if next(is_new) and ARGV[1] ~= '' then redis.pcall('PUBLISH', ARGV[1], '') end
return answers
