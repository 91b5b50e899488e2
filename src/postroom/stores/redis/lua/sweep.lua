-- Make messages dead that have no attempt left: those whose worker did not come back, and those that wait.
-- ARGV: the attempts that a message has. Answers how many were made dead.
local LIMIT, PAGE = 1000, 100
local max_attempts = tonumber(ARGV[1])

-- Look through what a range of a key brings, a page at a time; what is made dead leaves the range by that.
local function look(key, from, to, is_spent, reason)
  local count, offset = 0, 0
  while count + offset < LIMIT do
    local ids = redis.call('ZRANGEBYSCORE', key, from, to, 'LIMIT', offset, PAGE)
    offset = offset + #ids
    for _, id in ipairs(ids) do
      local state = read(id)
      if state and is_spent(state) then
        bury(id, state, reason(id))
        count, offset = count + 1, offset - 1
      end
    end
    if #ids < PAGE then break end
  end
  return count
end

local function has_crashed(state)
  return state[STATUS] == LEASED and state[UNTIL] < now and state[ATTEMPTS] >= max_attempts
end

local function has_waited(state)
  return state[STATUS] == PENDING and state[DUE] <= now and state[ATTEMPTS] >= max_attempts
end

local moment = '(' .. string.format('%.0f', now)
return look(leased, '-inf', moment, has_crashed, function()
  return 'the lease ran out on the last attempt: the worker crashed or stalled'
end) + look(tried, max_attempts, '+inf', has_waited, function(id)
  return redis.call('HGET', errors, id) or 'no attempts left'
end)
