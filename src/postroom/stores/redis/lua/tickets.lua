-- What the scripts about tickets have in common; it stands between what all scripts have in common and each of them,
-- and after the function `enqueue`, which is enqueue.lua.
--
-- A ticket is known from `schedule` until it is forgotten, long after its end: what has ended cannot end again.
local tickets = KEYS[16] -- by ticket: how it stands, in one letter, and when it ends, in milliseconds
local expiries, endings = KEYS[17], KEYS[18] -- open tickets by when they end, and the others by when that was
local OPEN, EXPIRED, REVOKED = 's', 'e', 'r'
local WORDS = { s = 'scheduled', e = 'expired', r = 'revoked' }

wrong = misfit(15, { 'hash', 'zset', 'zset' })
if wrong then return wrong end

-- How a ticket stands, and when it ends; nothing if it is not known.
local function look(ticket)
  local found = redis.call('HGET', tickets, ticket)
  if found then return found:sub(1, 1), found:sub(2) end
end

-- Have an open ticket end at a time.
local function place(ticket, expires)
  redis.call('HSET', tickets, ticket, OPEN .. expires)
  redis.call('ZADD', expiries, expires, ticket)
end

local function finish(ticket, status, expires)
  redis.call('HSET', tickets, ticket, status .. expires)
  redis.call('ZADD', endings, string.format('%.0f', math.floor(now / 1000)), ticket)
  redis.call('ZREM', expiries, ticket)
end

-- End a ticket, together with the event that tells of it; what enqueue.lua takes begins at `first`.
-- Answers what that does: a 1 if the event is new, or the id of the one that is there.
local function tell(ticket, status, expires, first)
  local answer = enqueue({ unpack(ARGV, first) })
  if answer.err then return answer end
  finish(ticket, status, expires)
  return { 'told', answer[1] }
end
