-- Lease entries to one worker: those whose lease ran out, then those that wait and are due, then new ones; or one suspect
-- alone.
-- ARGV: the group, how many, the lease in milliseconds, the attempts that a message has, after how many of them it is a
-- suspect, under which name, what the names of those begin with whose process is gone or nothing, whether suspects come
-- first, the tenant or nothing, where to look on among those that wait, how many bytes at most or nothing, how many new
-- entries may be expected to fit into that, how many bytes a small entry has at most, whether the caller has read a
-- larger one that was not announced, whether to look for what a worker did not come back for, and how many milliseconds
-- that must be idle or nothing.
-- Answers where to look on if there was too much to look through, the base of tokens, whether it is a suspect, the
-- entries that were read before, for each of them its deliveries and attempts, the new entries, and how many more new
-- entries the caller may read without this script.
local limit, lease, max_attempts, suspect_after = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local me, gone, is_suspects_turn, tenant, since = ARGV[6], ARGV[7], ARGV[8] == '1', ARGV[9], ARGV[10]
local max_bytes, expected, small = tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[13])
local is_looking = ARGV[15] == '1'
min_idle = tonumber(ARGV[16])

begin()
if ARGV[14] == '1' then expect_large(now + UNANNOUNCED) end
local ids, counts = {}, {}
local bytes, is_full = 0, limit < 1

-- Count the bytes of one more entry; tell whether it fits, which the first always does.
local function fits(size, is_first)
  bytes = bytes + size
  if bytes > max_bytes and not is_first then is_full = true end
  return not is_full
end

-- Choose an entry if it fits.
local function choose(entry, count)
  if max_bytes then
    local found = redis.call('XRANGE', stream, entry, entry)[1]
    if found and not fits(size_of(found[2]), #ids == 0) then return false end
  end
  ids[#ids + 1], counts[#counts + 1] = entry, count
  is_full = is_full or #ids >= limit
  return true
end

-- What was left behind by a process that had our name before us need not wait for its lease. What we hold ourselves
-- is told by what comes next in the name.
if gone ~= '' then
  local ours = me:match('^[^|]*|[^|]*|')
  for _, name in ipairs(redis.call('ZRANGE', leases, 0, -1)) do
    if name:sub(1, #gone) == gone and name:sub(1, #ours) ~= ours then redis.call('ZADD', leases, 0, name) end
  end
end

-- What a worker did not come back for.
local suspect, suspect_count
local function visit(entry, count)
  if is_full then return nil end
  local attempts = count - note_of(entry)[RELEASED]
  if attempts < suspect_after then return choose(entry, count) or nil end
  if not suspect and attempts < max_attempts then suspect, suspect_count = entry, count end
  return false
end

local names = limit > 0 and is_looking and overdue() or {}
for _, name in ipairs(names) do
  if is_full or scanned >= SCANNED then break end
  look(name, visit)
end

-- What is due now goes to the end of the stream, in its order.
local soon = redis.call('ZRANGEBYSCORE', delayed, '-inf', whole(now), 'WITHSCORES', 'LIMIT', 0, limit)
-- A group that is made later would begin by forgetting what is noted here.
local refused = #soon > 0 and found_group()
if refused then return refused end
for number = 1, #soon, 2 do
  local member = soon[number]
  local packed = redis.call('HGET', later, member)
  if packed then
    if #packed > small then expect_large(0) end
    local record = cmsgpack.unpack(packed)
    record[#record + 1], record[#record + 2] = 'postroom:time', whole(record[1])
    local entry = redis.call('XADD', stream, '*', unpack(record, 2))
    write(entry, { 0, tonumber(soon[number + 1]), now, 0, '', '' })
  end
  redis.call('ZREM', delayed, member)
  redis.call('HDEL', later, member)
end

-- What waits for its next try, of all topics, the oldest first.
local more = false
local is_alone = suspect and is_suspects_turn
if not is_full and not is_alone and redis.call('EXISTS', waiting) == 1 then
  local numbers = redis.call('HVALS', topics)
  local found, room = {}, limit - #ids
  local size = tenant == '' and room or math.max(room, PAGE)
  size = math.max(1, math.min(size, math.ceil(SCANNED / math.max(#numbers, 1))))
  for _, word in ipairs(numbers) do
    local topic = math.min(tonumber(word), 65535)
    local from = (since == '' and '[' or '(') .. struct.pack('>I2', topic) .. since
    local to = '(' .. struct.pack('>I2I8', topic, now + 1)
    local members = redis.call('ZRANGEBYLEX', waiting, from, to, 'LIMIT', 0, size)
    for _, member in ipairs(members) do found[#found + 1] = { member:sub(3), member } end
    if #members == size then
      -- What comes after the last that was looked at is not known, and may be older than what others have.
      local last = members[size]:sub(3)
      more = more and more < last and more or last
    end
  end
  table.sort(found, function(one, other) return one[1] < other[1] end)
  for _, one in ipairs(found) do
    local place, member = unpack(one)
    if is_full or (more and place > more) then break end
    local entry = place:sub(9)
    local note = note_of(entry)
    local name, count = holder(entry)
    if name ~= WAITING then
      redis.call('ZREM', waiting, member) -- somebody else has acknowledged it, or claimed it by hand
    elseif count - note[RELEASED] < max_attempts and (tenant == '' or note[TENANT] == tenant) then
      if not choose(entry, count) then break end
      redis.call('ZREM', waiting, member)
    end
  end
end

if suspect and (is_alone or (#ids == 0 and not unread())) then
  -- What was chosen before the turn of the suspect came stays where it was, and is looked for again.
  for _, name in ipairs(#ids > 0 and names or {}) do redis.call('ZADD', leases, 'XX', whole(now - 1), name) end
  ids, counts = { suspect }, { suspect_count }
else
  suspect = nil
end

local taken, deliveries = {}, {}
if #ids > 0 then
  local there = {}
  for _, one in ipairs(redis.call('XCLAIM', stream, group, me, 0, unpack(ids))) do
    if one and one[2] then there[one[1]] = one end
  end
  for number, entry in ipairs(ids) do
    local count, one = counts[number] + 1, there[entry]
    if one then
      taken[#taken + 1] = one
      deliveries[#deliveries + 1], deliveries[#deliveries + 2] = count, count - note_of(entry)[RELEASED]
    else
      mourn(entry, count)
    end
  end
end
if limit < 1 then return { '', whole(base), 0, taken, deliveries, {}, 0 } end
-- Also for what is read next: a name that holds nothing is found out when its time has come.
redis.call('ZADD', leases, 'NX', whole(now + lease * 1000), me)
local rest = #taken == 0 and more or ''
if suspect or is_full or rest ~= '' then return { rest, whole(base), suspect and 1 or 0, taken, deliveries, {}, 0 } end

-- A script copies every word that it reads twice, which takes longer than the reading itself. While many small entries
-- are waiting, that is not needed to keep the bound.
local wanted, large = limit - #taken, large_until()
local is_bounded = not large and wanted * small <= (max_bytes or 0) - bytes and count_unread() >= DEEP * limit
if not max_bytes or is_bounded then return { '', whole(base), 0, taken, deliveries, {}, wanted } end

-- Lease new entries, as long as they fit. To read is to lease, so those that were read beyond that are unread again: no
-- other script can come in between.
local fresh = {}

local function unread_from(page, first)
  local entries = {}
  for place = first, #page do entries[#entries + 1] = page[place][1] end
  redis.call('XACK', stream, group, unpack(entries))
  redis.call('XGROUP', 'SETID', stream, group, before(entries[1]))
end

local function read_new(count)
  local read = redis.pcall('XREADGROUP', 'GROUP', group, me, 'COUNT', count, 'STREAMS', stream, '>')
  if not read or read.err then return {}, read and read.err and read end
  return read[1] and read[1][2] or {}
end

local count = expected
while wanted > 0 and not is_full do
  count = math.min(count, wanted)
  local page, failed = read_new(count)
  -- Whatever it was, it will come up again when what was taken is under way.
  if failed and #taken + #fresh == 0 then return failed end
  for place, one in ipairs(page) do
    local size = size_of(one[2])
    if size > small and not large then expect_large(now + UNANNOUNCED) end
    if not fits(size, #taken + #fresh == 0) then
      unread_from(page, place)
      break
    end
    fresh[#fresh + 1] = one
  end
  if #page < count then
    if large and now > large and not (is_full or failed) then redis.call('HDEL', counters, 'large') end
    break
  end
  wanted = limit - #taken - #fresh
  count = math.max(1, math.floor((max_bytes - bytes) * (#taken + #fresh) / math.max(bytes, 1)))
end
return { '', whole(base), 0, taken, deliveries, fresh, 0 }
