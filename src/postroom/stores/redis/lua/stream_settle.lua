-- Record what became of claims.
-- ARGV: the group, whether receipts are kept, all that were delivered, and seven words for each that was not.
-- Of a delivered one is told its entry and token, and if receipts are kept its attempts and id too, with blanks between
-- them; of the others the entry, the token, what became of it (r to be tried again, x dead, e given back), after which
-- delay, the error, topic and tenant.
-- Answers the numbers of the claims that were lost, about which nothing was recorded; the delivered are counted first.
local keeps, lost, number = ARGV[2] == '1', {}, 0

begin()
local function lose()
  lost[#lost + 1] = number
end

-- What is known of an entry that nobody holds and that has ended: its token, nothing if it has not.
local function grave_of(entry)
  local grave = redis.call('HGET', graves, entry)
  if grave then return cmsgpack.unpack(grave) end
end

local function keep(entry, token, attempts, id)
  redis.call('ZADD', done, whole(now), entry)
  redis.call('HSET', receipts, entry, cmsgpack.pack({ token, tonumber(attempts), id }))
end

-- A delivery of which we hear late: the entry was buried, was delivered before, or has to come again.
local function is_known(entry, token, attempts, id)
  local grave = grave_of(entry)
  if grave then
    if grave[2] ~= token then return false end
    redis.call('XDEL', dead, grave[1])
    redis.call('HDEL', graves, entry)
    if keeps then keep(entry, token, attempts, id) end
    return true
  end
  local receipt = redis.call('HGET', receipts, entry)
  if receipt then return cmsgpack.unpack(receipt)[1] == token end
  return #redis.call('XRANGE', stream, entry, entry) == 0 -- only delivered messages are ever deleted
end

-- What was claimed together mostly stands together: it is looked up with one call instead of one for each.
local entries, tokens, rest, together, size = {}, {}, {}, {}, 0
for entry, token, attempts, id in ARGV[3]:gmatch(keeps and '(%S+) (%S+) (%S+) (%S+)' or '(%S+) (%S+)') do
  size = size + 1
  entries[size], tokens[size] = entry, tonumber(token)
  if keeps then rest[size] = { attempts, id } end
end
if size > 1 then
  local held = redis.pcall('XPENDING', stream, group, entries[1], entries[size], 2 * size)
  for _, one in ipairs(held.err and {} or held) do together[one[1]] = one end
end

local ended = {}
for place, entry in ipairs(entries) do
  number = place
  local token, one, name, count = tokens[place], together[entry], nil, nil
  local attempts, id
  if keeps then attempts, id = unpack(rest[place]) end
  if one then
    name, count = one[2], one[4]
  else
    name, count = holder(entry)
  end
  if not name then
    if not is_known(entry, token, attempts, id) then lose() end
  elseif name == WAITING or base + count ~= token then
    lose()
  else
    ended[#ended + 1] = entry
    if keeps then keep(entry, token, attempts, id) end
  end
end
if #ended > 0 then
  redis.call('XACK', stream, group, unpack(ended))
  redis.call('XDEL', stream, unpack(ended))
  if redis.call('EXISTS', notes) == 1 then redis.call('HDEL', notes, unpack(ended)) end
end

local function topic_number(topic)
  local found = redis.call('HGET', topics, topic)
  if not found then
    found = redis.call('HLEN', topics)
    redis.call('HSET', topics, topic, found)
  end
  -- Beyond what two bytes can say, topics share the last number: they are looked through together.
  return math.min(tonumber(found), 65535)
end

-- Have an entry wait for its next try.
local function put_back(entry, count, outcome, delay, reason, topic, tenant)
  local note = note_of(entry)
  if outcome == 'r' then
    note[REASON], note[DUE] = reason, now + delay
  else
    note[RELEASED] = note[RELEASED] + 1
    -- The clock may have been ahead when it came, and was put right since.
    note[DUE] = delay > 0 and now + delay or math.min(note[DUE], now)
  end
  note[TOPIC], note[TENANT] = topic_number(topic), tenant
  local held = redis.call('XCLAIM', stream, group, WAITING, 0, entry, 'RETRYCOUNT', count, 'JUSTID')
  if #held == 0 then
    mourn(entry, count)
  else
    write(entry, note)
    redis.call('ZADD', waiting, 0, by_due(entry, note))
  end
end

for first = 4, #ARGV, 7 do
  number = number + 1
  local entry, word, outcome, delay, reason, topic, tenant = unpack(ARGV, first, first + 6)
  local token, name, count = tonumber(word), holder(entry)
  if not name then
    local grave = outcome == 'x' and grave_of(entry)
    if not grave or grave[2] ~= token then lose() end
  elseif base + count ~= token then
    lose()
  elseif name == WAITING then
    if outcome == 'x' then lose() end -- it was settled before: in this way, which is no loss, or in another
  elseif outcome == 'x' then
    bury(entry, count, reason)
  else
    put_back(entry, count, outcome, tonumber(delay), reason, topic, tenant)
  end
end
return lost
