-- Make messages dead that have no attempt left: those whose worker did not come back, and those that wait. Look after
-- the names of consumers as well.
-- ARGV: the group, the attempts that a message has, after how many milliseconds a name is forgotten that holds nothing,
-- and how many milliseconds an entry must be idle before it is taken over or nothing. Answers how many were made dead.
local LIMIT = 1000
local max_attempts, idle, count = tonumber(ARGV[2]), tonumber(ARGV[3]), 0
min_idle = tonumber(ARGV[4])

local function visit(entry, deliveries)
  if count >= LIMIT then return nil end
  if deliveries - note_of(entry)[RELEASED] < max_attempts then return false end
  bury(entry, deliveries, 'the lease ran out on the last attempt: the worker crashed or stalled')
  count = count + 1
  return true
end

begin()
for _, name in ipairs(overdue()) do
  if count >= LIMIT or scanned >= SCANNED then break end
  look(name, visit)
end

-- Those that wait, some at a time: the next sweep goes on where this one ends.
local from = redis.call('HGET', counters, 'swept') or ''
local members = redis.call('ZRANGEBYLEX', waiting, '(' .. from, '+', 'LIMIT', 0, LIMIT)
for _, member in ipairs(members) do
  local at, entry = struct.unpack('>I8', member, 3), member:sub(11)
  local name, deliveries = holder(entry)
  if name == WAITING and at <= now then
    local note = note_of(entry)
    if deliveries - note[RELEASED] >= max_attempts then
      bury(entry, deliveries, note[REASON] ~= '' and note[REASON] or 'no attempts left')
      count = count + 1
    end
  end
end
if #members < LIMIT then
  redis.call('HDEL', counters, 'swept')
else
  redis.call('HSET', counters, 'swept', members[#members])
end

-- A name that nobody uses any more goes, but never with something in its hands; what somebody read by hand is known
-- from now on as if it were leased.
local consumers = redis.pcall('XINFO', 'CONSUMERS', stream, group)
for _, one in ipairs(consumers.err and {} or consumers) do
  local said = named(one)
  if said.pending > 0 and said.name ~= WAITING then
    redis.call('ZADD', leases, 'NX', whole(now), said.name)
  elseif said.pending == 0 and said.idle >= idle then
    redis.call('XGROUP', 'DELCONSUMER', stream, group, said.name)
    redis.call('ZREM', leases, said.name)
    redis.call('HDEL', scans, said.name)
  end
end
return count
