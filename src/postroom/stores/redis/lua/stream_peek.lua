-- Show messages that claims would bring next; nothing is written.
-- ARGV: the group, how many, and how many milliseconds an entry must be idle before it is taken over or nothing.
-- Answers the base of tokens, and then for each message its entry, or nothing for one that is not in the stream yet, its
-- fields, its deliveries, its attempts, and for how many microseconds it has been due.
local limit = tonumber(ARGV[2])
min_idle = tonumber(ARGV[3])
local answer = { whole(base) }
local count = 0

local function show(entry, fields, deliveries, attempts, at)
  count = count + 1
  for _, part in ipairs({ entry, fields, deliveries, attempts, whole(now - at) }) do answer[#answer + 1] = part end
end

-- Show an entry that the group has read.
local function show_held(entry, deliveries)
  local note, found = note_of(entry), redis.call('XRANGE', stream, entry, entry)[1]
  if found then show(entry, found[2], deliveries, deliveries - note[RELEASED], note[DUE]) end
end

-- What a worker did not come back for.
for _, name in ipairs(overdue()) do
  if count >= limit or scanned >= SCANNED then break end
  local lease, is_gone = idle_time(name), tonumber(redis.call('ZSCORE', leases, name)) == 0
  local held = redis.pcall('XPENDING', stream, group, '-', '+', SCANNED - scanned, name)
  for _, one in ipairs(held.err and {} or held) do
    if count < limit and (is_gone or one[3] > lease) then show_held(one[1], one[4]) end
  end
  scanned = scanned + #held
end

-- What waits for its next try, of all topics, the oldest first.
local numbers = count < limit and redis.call('EXISTS', waiting) == 1 and redis.call('HVALS', topics) or {}
local found, more = {}, false
local size = math.max(1, math.min(limit, math.ceil(SCANNED / math.max(#numbers, 1))))
for _, word in ipairs(numbers) do
  local topic = math.min(tonumber(word), 65535)
  local from, to = '[' .. struct.pack('>I2', topic), '(' .. struct.pack('>I2I8', topic, now + 1)
  local members = redis.call('ZRANGEBYLEX', waiting, from, to, 'LIMIT', 0, size)
  for _, member in ipairs(members) do found[#found + 1] = member:sub(3) end
  if #members == size then
    -- What comes after the last that was looked at is not known, and may be older than what others have.
    local last = members[size]:sub(3)
    more = more and more < last and more or last
  end
end
table.sort(found)
for _, place in ipairs(found) do
  if count >= limit or (more and place > more) then break end
  local name, deliveries = holder(place:sub(9))
  if name == WAITING then show_held(place:sub(9), deliveries) end
end

-- What is new, and behind it what a claim would add to the stream because its time has come.
local first = count < limit and unread()
for _, one in ipairs(first and redis.call('XRANGE', stream, first, '+', 'COUNT', limit - count) or {}) do
  show(one[1], one[2], 0, 0, note_of(one[1])[DUE])
end
local soon = count < limit
  and redis.call('ZRANGEBYSCORE', delayed, '-inf', whole(now), 'WITHSCORES', 'LIMIT', 0, limit - count) or {}
for number = 1, #soon, 2 do
  local packed = redis.call('HGET', later, soon[number])
  if packed then
    local record = cmsgpack.unpack(packed)
    record[#record + 1], record[#record + 2] = 'postroom:time', whole(record[1])
    table.remove(record, 1)
    show('', record, 0, 0, tonumber(soon[number + 1]))
  end
end
return answer
