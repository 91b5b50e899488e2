-- What all scripts have in common; it stands before each of them.
--
-- Every key is declared, and all of them share one hash tag, so that a cluster keeps them together. Keys that are
-- sorted by text hold members that begin with what they are looked up by: numbers in them are big-endian.
local entries, states, errors = KEYS[1], KEYS[2], KEYS[3] -- by id: what was stored, what became of it, and why
local due, held, leased = KEYS[4], KEYS[5], KEYS[6] -- heads that may go out, heads behind a dead one, and what is out
local dead, done = KEYS[7], KEYS[8] -- by the time at which they ended
local lanes, tombs = KEYS[9], KEYS[10] -- keyed messages in their order: those that wait or are out, and the dead
local dedupes, topics, counters = KEYS[11], KEYS[12], KEYS[13]
local tried = KEYS[14] -- by their attempts: what is pending again
local parked = KEYS[15] -- by their destination: what waits until that is back; members may be stale

-- Writes that came before an error stay, so whatever could fail is found out before the first of them.
local function misfit(before, kinds)
  for number, kind in ipairs(kinds) do
    local key = KEYS[before + number]
    local found = redis.call('TYPE', key).ok
    if found ~= 'none' and found ~= kind then
      return redis.error_reply('WRONGTYPE ' .. key .. ' is a ' .. found .. ', and should be a ' .. kind)
    end
  end
end

local wrong = misfit(0, {
  'hash', 'hash', 'hash', 'zset', 'zset', 'zset', 'zset', 'zset', 'zset', 'zset', 'hash', 'hash', 'hash',
  'zset', 'zset',
})
if wrong then return wrong end

-- Only the server's clock counts, in microseconds.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

-- A state is an array, since names would take more room than what they name.
local STATUS, TOKEN, ATTEMPTS, DUE, UNTIL, CHANGED = 1, 2, 3, 4, 5, 6
local SEQ, TOPIC, LANE, TENANT, WORKER, DEDUPE = 7, 8, 9, 10, 11, 12
-- Both are missing in what was never parked. Workers of an earlier version keep them and do not know them, so a message
-- is parked only while the token is the one it was parked with: any claim ends it.
local PARKED, DESTINATION = 13, 14
local PENDING, LEASED, DELIVERED, DEAD = 'p', 'l', 'd', 'x'

local function read(id)
  local state = redis.call('HGET', states, id)
  return state and cmsgpack.unpack(state)
end

local function write(id, state)
  state[CHANGED] = now
  redis.call('HSET', states, id, cmsgpack.pack(state))
end

-- Most messages have no key, and so nothing to do with each other: what is to be written of them can wait until the
-- end of a script, where one command takes many. A call for each would take most of a script's time.
local waiting, order = {}, {}

local function later(command, key, member, value)
  local list = waiting[command .. key]
  if not list then
    list = { command, key }
    waiting[command .. key] = list
    order[#order + 1] = list
  end
  list[#list + 1] = member
  if value then list[#list + 1] = value end
end

local function flush()
  local SIZE = 1000
  local lists = order
  waiting, order = {}, {}
  for _, list in ipairs(lists) do
    for first = 3, #list, SIZE do
      redis.call(list[1], list[2], unpack(list, first, math.min(first + SIZE - 1, #list)))
    end
  end
end

-- Where a parked message stands among those of its destination, no name of which has a zero byte.
local function by_parked(id, state)
  return state[DESTINATION] .. '\0' .. struct.pack('>I8I8', state[DUE], state[SEQ]) .. id
end
local PARKED_TAIL = 1 + 8 + 8 + 16 -- bytes of that after the destination

local function is_parked(state)
  return state[STATUS] == PENDING and state[PARKED] == state[TOKEN]
end

-- Where a head stands among those of its topic. Parked ones stand together as if they had a topic of their own, so that
-- claims do not look at every topic of which nothing but parked messages is left. A real topic may have the same number,
-- since what stands there is looked at in its state.
local PARKED_TOPIC = 65535
local function by_due(id, state)
  return struct.pack('>I2I8I8', is_parked(state) and PARKED_TOPIC or state[TOPIC], state[DUE], state[SEQ]) .. id
end

-- Where a message stands among those of its key.
local function by_seq(id, state)
  return state[LANE] .. struct.pack('>I8', state[SEQ]) .. id
end

local LAST = string.rep('\255', 24)

-- The topics that have heads in a key, by stepping from each to the next: most topics of a namespace may have none.
local function topics_with_heads(key)
  local found, from = {}, '-'
  while true do
    local member = redis.call('ZRANGEBYLEX', key, from, '+', 'LIMIT', 0, 1)[1]
    if not member then return found end
    found[#found + 1] = struct.unpack('>I2', member)
    from = '(' .. member:sub(1, 2) .. LAST
  end
end

-- The first of a lane that waits or is out.
local function head(lane)
  local member = redis.call('ZRANGEBYLEX', lanes, '[' .. lane, '(' .. lane .. LAST, 'LIMIT', 0, 1)[1]
  return member and member:sub(#lane + 9)
end

-- Whether a dead message of the lane came before this one.
local function is_held(state)
  local before = state[LANE] .. struct.pack('>I8', state[SEQ])
  return #redis.call('ZRANGEBYLEX', tombs, '[' .. state[LANE], '(' .. before, 'LIMIT', 0, 1) > 0
end

-- Put a pending message where claims look for it, unless it waits for an earlier one of its key.
local function offer(id, state)
  if state[LANE] == '' then
    redis.call('ZADD', due, 0, by_due(id, state))
  elseif head(state[LANE]) == id then
    redis.call('ZADD', is_held(state) and held or due, 0, by_due(id, state))
  end
end

-- Take a message away from where claims look for it.
local function withdraw(id, state)
  local member = by_due(id, state)
  redis.call('ZREM', due, member)
  if state[LANE] ~= '' then redis.call('ZREM', held, member) end
end

-- Look again at the head of a lane, after something of the lane has ended or come back.
local function promote(lane)
  local id = lane ~= '' and head(lane)
  local state = id and read(id)
  if state and state[STATUS] == PENDING then
    withdraw(id, state)
    offer(id, state)
  end
end

-- End what is pending or out: it is dead, and those of its key are held back.
local function bury(id, state, reason)
  withdraw(id, state)
  redis.call('ZREM', leased, id)
  redis.call('ZREM', tried, id)
  if is_parked(state) then
    redis.call('ZREM', parked, by_parked(id, state))
    state[PARKED] = 0
  end
  state[STATUS], state[UNTIL], state[WORKER] = DEAD, 0, ''
  redis.call('HSET', errors, id, reason)
  write(id, state)
  redis.call('ZADD', dead, now, id)
  redis.call('HINCRBY', counters, 'died', 1)
  if state[LANE] ~= '' then
    redis.call('ZREM', lanes, by_seq(id, state))
    redis.call('ZADD', tombs, 0, by_seq(id, state))
    promote(state[LANE])
  end
end

-- Forget a message that has ended; its index entries are gone by then, or on their way.
local function forget(id, state)
  if state[DEDUPE] ~= '' and redis.call('HGET', dedupes, state[DEDUPE]) == id then
    later('HDEL', dedupes, state[DEDUPE])
  end
  if state[ATTEMPTS] > 1 then later('HDEL', errors, id) end
  later('HDEL', entries, id)
  later('HDEL', states, id)
end

