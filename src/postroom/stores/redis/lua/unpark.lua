-- Make messages due that are parked for a destination, those that were parked first.
-- ARGV: the destination, and how many members to look at. Answers how many members there were, and how many messages are
-- due now; members that belong to no parked message any more are removed.
local destination, limit = ARGV[1], tonumber(ARGV[2])
local prefix = destination .. '\0'

-- They are due as of when they came, so that claims find them before newer ones.
local function unpark(id, state)
  redis.call('ZREM', parked, by_parked(id, state))
  withdraw(id, state)
  state[DUE], state[PARKED] = math.min(state[SEQ], now), 0
  write(id, state)
  offer(id, state)
end

local function is_here(state)
  return state and is_parked(state) and state[DESTINATION] == destination
end

local members = redis.call('ZRANGEBYLEX', parked, '[' .. prefix, '(' .. destination .. '\1', 'LIMIT', 0, limit)
local count = 0
for _, member in ipairs(members) do
  local id = member:sub(-16)
  local state = read(id)
  if is_here(state) and by_parked(id, state) == member then
    unpark(id, state)
    count = count + 1
    -- Behind a head that stays parked it could not be claimed.
    local first = state[LANE] ~= '' and head(state[LANE])
    local its = first and first ~= id and read(first)
    if its and is_here(its) then
      unpark(first, its)
      count = count + 1
    end
  else
    redis.call('ZREM', parked, member) -- claimed since, by a worker that knows nothing of this, or unparked just now
  end
end
return { #members, count }
