-- What all scripts of the stream have in common; it stands before each of them. The first argument is the group.
--
-- A message is an entry of the stream. Who holds it, since when and for the how manieth time is said by the group's
-- list of pending entries alone, so a message that goes out at the first try is written nowhere else. What else is to
-- be known of a message is in its note, and most have none.
local stream, dead = KEYS[1], KEYS[2] -- what waits or is out, and what will not be tried again
local delayed, later = KEYS[3], KEYS[4] -- what is not due yet: when, and what
local waiting, topics = KEYS[5], KEYS[6] -- what was read and waits for its next try, by topic and time
local notes, graves = KEYS[7], KEYS[8] -- by entry: what became of it, and where it is buried
local leases, scans = KEYS[9], KEYS[10] -- by consumer: before when no lease of its runs out, and where to look on
local done, receipts = KEYS[11], KEYS[12] -- what was delivered: when, and under which token
local counters = KEYS[13]

-- Writes that came before an error stay, so whatever could fail is found out before the first of them.
local kinds = {
  'stream', 'stream', 'zset', 'hash', 'zset', 'hash', 'hash', 'hash', 'zset', 'hash', 'zset', 'hash', 'hash',
}
for number, kind in ipairs(kinds) do
  local found = redis.call('TYPE', KEYS[number]).ok
  if found ~= 'none' and found ~= kind then
    return redis.error_reply('WRONGTYPE ' .. KEYS[number] .. ' is a ' .. found .. ', and should be a ' .. kind)
  end
end

-- Only the server's clock counts, in microseconds; the list of pending entries knows milliseconds.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

local group = ARGV[1]
-- Holds what waits for its next try: in the list of pending entries, where its deliveries go on being counted.
local WAITING = '~waiting'
-- After how many milliseconds an entry is taken from a consumer whose name does not say it, unless the store does.
local FOREIGN = 60000
-- How many milliseconds an entry must be idle before it is taken over, if the store says so: a script sets it.
local min_idle

-- Tokens are the deliveries that the group has counted; those of a group that was made anew are above all before.
local GENERATION = 4294967296
local base = ((tonumber(redis.call('HGET', counters, 'groups')) or 1) - 1) * GENERATION

-- A note is an array, since names would take more room than what they name.
local RELEASED, DUE, CHANGED, TOPIC, TENANT, REASON = 1, 2, 3, 4, 5, 6

local function whole(number)
  return string.format('%.0f', number)
end

-- When an entry came into the stream.
local function arrival(entry)
  return entry:match('^%d+') * 1000
end

local function note_of(entry)
  local note = redis.call('HGET', notes, entry)
  if note then return cmsgpack.unpack(note) end
  return { 0, arrival(entry), now, 0, '', '' }
end

local function write(entry, note)
  note[CHANGED] = now
  redis.call('HSET', notes, entry, cmsgpack.pack(note))
end

-- Where an entry that waits stands among those of its topic.
local function by_due(entry, note)
  return struct.pack('>I2I8', note[TOPIC], note[DUE]) .. entry
end

-- A server without memory refuses a script at its first write, if that could take some; later ones are let through. What
-- has to work all the same, since memory is won by delivering, begins with a write that takes none.
local function begin()
  redis.call('ZREM', leases, '')
end

-- Who holds an entry, and how often it was delivered: nothing if nobody does, or if there is no group.
local function holder(entry)
  local found = redis.pcall('XPENDING', stream, group, entry, entry, 1)
  if found.err then
    if found.err:sub(1, 7) ~= 'NOGROUP' then redis.call('XPENDING', stream, group, entry, entry, 1) end
    return nil
  end
  if found[1] then return found[1][2], found[1][4] end
end

-- Have nobody hold an entry any more, and the stream forget it.
local function drop(entry)
  redis.call('XACK', stream, group, entry)
  redis.call('XDEL', stream, entry)
  redis.call('HDEL', notes, entry)
end

-- What a script can hand on to one command. No message of ours has half as many words; an entry of somebody else's may.
local MOST = 7900

-- End an entry that is held: what it says goes to the dead ones, with the reason.
local function bury(entry, count, reason)
  local note = note_of(entry)
  local attempts = count - note[RELEASED]
  local found = redis.call('XRANGE', stream, entry, entry)[1]
  local fields = found and found[2] or {}
  if #fields > MOST then
    reason = reason .. ' (of its ' .. #fields / 2 .. ' fields the first ' .. MOST / 2 .. ' are kept)'
    fields = { unpack(fields, 1, MOST) }
  end
  for _, word in ipairs({ 'postroom:entry', entry, 'postroom:attempts', attempts, 'postroom:error', reason }) do
    fields[#fields + 1] = word
  end
  redis.call('ZREM', waiting, by_due(entry, note))
  local grave = redis.call('XADD', dead, '*', unpack(fields))
  redis.call('HSET', graves, entry, cmsgpack.pack({ grave, base + count, attempts, now }))
  drop(entry)
end

-- An entry that somebody deleted while it was held is lost; that much is told.
local function mourn(entry, count)
  bury(entry, count, 'the entry was deleted from the stream, by XDEL or a trim, before it was delivered')
  redis.call('HINCRBY', counters, 'trimmed', 1)
end

-- Make the group if it is not there. What the group before knew of its entries is gone with it: they come again.
local function found_group()
  local known = redis.call('HGET', counters, 'group')
  if known and known ~= group then
    return redis.error_reply('GROUP this stream belongs to the group ' .. known .. '; only one can delete what it read')
  end
  local made = redis.pcall('XGROUP', 'CREATE', stream, group, '0', 'MKSTREAM')
  if made.err then return made.err:sub(1, 9) ~= 'BUSYGROUP' and made or nil end
  redis.call('HSET', counters, 'group', group)
  base = (redis.call('HINCRBY', counters, 'groups', 1) - 1) * GENERATION
  redis.call('DEL', waiting, notes, leases, scans)
end

-- What the server tells as names and values in turn.
local function named(pairs)
  local said = {}
  for number = 1, #pairs, 2 do said[pairs[number]] = pairs[number + 1] end
  return said
end

-- The entry after this one, wherever it is: ranges that leave out their first are younger than the oldest server.
local function after(entry)
  local time, number = entry:match('^(%d+)-(%d+)$')
  return time .. '-' .. whole(number + 1)
end

-- The place right before an entry, whether or not there is one.
local function before(entry)
  local time, number = entry:match('^(%d+)-(%d+)$')
  if number ~= '0' then return time .. '-' .. whole(number - 1) end
  return whole(time - 1) .. '-18446744073709551615'
end

-- The first entry that the group has not read, and how many it has read that are not acknowledged.
local function unread()
  local from, held = '-', 0
  for _, one in ipairs(redis.call('EXISTS', stream) == 1 and redis.call('XINFO', 'GROUPS', stream) or {}) do
    local said = named(one)
    if said.name == group then from, held = after(said['last-delivered-id']), said.pending end
  end
  local found = redis.call('XRANGE', stream, from, '+', 'COUNT', 1)[1]
  return found and found[1], held
end

local function size_of(fields)
  local size = 0
  for _, word in ipairs(fields) do size = size + #word end
  return size
end

-- Our producers and scripts announce an entry that is not small, with the time until which the announcement stays: 0 for
-- an entry of ours, a day for one that was found unannounced, since more of its kind may follow. The first claim after
-- that time which leaves nothing unread takes the announcement back.
local UNANNOUNCED = 86400000000

local function expect_large(time)
  redis.call('HSETNX', counters, 'large', whole(time))
end

-- Before which time large entries are to be expected in any case; nothing if there are none.
local function large_until()
  return tonumber(redis.call('HGET', counters, 'large'))
end

-- How many claims must be waiting before one of them reads without counting bytes: others read at the same time, and
-- what comes after that many may have been added, and announced, a moment ago.
local DEEP = 4

-- How many entries the group has not read.
local function count_unread()
  local held = redis.pcall('XPENDING', stream, group)
  return held.err and 0 or redis.call('XLEN', stream) - held[1]
end

local SCANNED, PAGE = 2000, 100
local scanned = 0

-- How many milliseconds an entry must be idle before it is taken from a consumer.
local function idle_time(name)
  local lease = tonumber(name:match('|(%d+)$'))
  return lease and math.max(lease, min_idle or 0) or min_idle or FOREIGN
end

-- Look at what a consumer holds and did not come back for. ``visit`` is told each entry and its deliveries, and answers
-- whether it took the entry away; nothing if it wants no more. How far this came is kept for the next time.
local function look(name, visit)
  local lease = idle_time(name)
  local is_gone = tonumber(redis.call('ZSCORE', leases, name)) == 0
  local start, earliest, is_left = '-', now + lease * 1000, false
  local scan = redis.call('HGET', scans, name)
  if scan then start, earliest, is_left = unpack(cmsgpack.unpack(scan)) end
  while true do
    local page = redis.pcall('XPENDING', stream, group, start, '+', PAGE, name)
    if page.err then return end
    for _, one in ipairs(page) do
      if is_gone or one[3] > lease then
        local took = visit(one[1], one[4])
        if took == nil then return end
        is_left = is_left or not took
      else
        earliest = math.min(earliest, now + (lease - one[3]) * 1000)
      end
    end
    scanned = scanned + #page
    if #page < PAGE then break end
    start = after(page[#page][1])
    if scanned >= SCANNED then
      redis.call('HSET', scans, name, cmsgpack.pack({ start, earliest, is_left }))
      return
    end
  end
  redis.call('HDEL', scans, name)
  if is_left then return end -- something stays for which its time has come
  if #redis.call('XPENDING', stream, group, '-', '+', 1, name) > 0 then
    redis.call('ZADD', leases, whole(earliest), name)
  else
    redis.call('ZREM', leases, name)
  end
end

-- The consumers some of whose leases may have run out.
local function overdue()
  return redis.call('ZRANGEBYSCORE', leases, '-inf', whole(now), 'LIMIT', 0, PAGE)
end
