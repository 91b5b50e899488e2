-- Compare some states with what is indexed, and mend what does not agree. Nothing should ever be found: scripts are
-- whole or not at all, and what a script leaves behind when it fails is why this exists.
-- ARGV: where to go on, and about how many to look at. Answers where to go on, and how many were mended.
local mended = 0

local function mend(is_wrong, fix)
  if is_wrong then
    fix()
    mended = mended + 1
  end
end

local function score(key, member)
  return redis.call('ZSCORE', key, member)
end

-- A member that should be there or not.
local function agree(key, member, value, is_due)
  local found = score(key, member)
  if is_due then
    mend(not found or (value ~= 0 and tonumber(found) ~= value), function() redis.call('ZADD', key, value, member) end)
  else
    mend(found, function() redis.call('ZREM', key, member) end)
  end
end

local page = redis.call('HSCAN', states, ARGV[1], 'COUNT', ARGV[2])
for number = 1, #page[2], 2 do
  local id = page[2][number]
  local state = read(id) -- as it is now: what was mended before may have changed it
  if state then
    local status, lane = state[STATUS], state[LANE]
    if lane ~= '' then
      agree(lanes, by_seq(id, state), 0, status == PENDING or status == LEASED)
      agree(tombs, by_seq(id, state), 0, status == DEAD)
    end
    agree(leased, id, state[UNTIL], status == LEASED)
    if state[DESTINATION] then agree(parked, by_parked(id, state), 0, is_parked(state)) end
    agree(tried, id, state[ATTEMPTS], status == PENDING and state[ATTEMPTS] > 0)
    if status == DEAD or status == DELIVERED then
      mend(status == DEAD and not score(dead, id), function() redis.call('ZADD', dead, state[CHANGED], id) end)
      mend(status == DELIVERED and not score(done, id), function() redis.call('ZADD', done, state[CHANGED], id) end)
    end
    agree(dead, id, 0, status == DEAD)
    agree(done, id, 0, status == DELIVERED)
    local is_head = status == PENDING and (lane == '' or head(lane) == id)
    local is_behind = is_head and lane ~= '' and is_held(state)
    agree(due, by_due(id, state), 0, is_head and not is_behind)
    agree(held, by_due(id, state), 0, is_behind)
    if state[DEDUPE] ~= '' then
      mend(not redis.call('HGET', dedupes, state[DEDUPE]), function()
        redis.call('HSET', dedupes, state[DEDUPE], id)
      end)
    end
  end
end
if mended > 0 then redis.call('HINCRBY', counters, 'mended', mended) end
return { page[1], mended }
