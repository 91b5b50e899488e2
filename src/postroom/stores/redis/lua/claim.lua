-- Lease messages to one worker: those whose lease ran out first, then those that are due; or one suspect alone.
-- ARGV: how many, the lease, the attempts that a message has, after how many of them it is a suspect, whether dead
-- messages are passed over, the tenant or nothing, the worker, whether suspects come first, where to look on, how many
-- bytes at most or nothing, and whether to look from the newest on.
-- Answers where to look on if there was too much to look through, and then for each its id, what is stored of it, its
-- attempts, token, seq and whether it is a suspect.
local SCANNED, PAGE = 2000, 200
local limit, lease, max_attempts, suspect_after = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local skips_dead, tenant, worker, is_suspects_turn = ARGV[5] == '1', ARGV[6], ARGV[7], ARGV[8] == '1'
local since, max_bytes, is_newest_first = ARGV[9], tonumber(ARGV[10]), ARGV[11] == '1'

local function is_ours(state)
  return tenant == '' or state[TENANT] == tenant
end

-- Whether a message may be claimed together with others.
local function is_ready(state)
  if not is_ours(state) then return false end
  if state[STATUS] == PENDING then return state[DUE] <= now and state[ATTEMPTS] < max_attempts end
  return state[STATUS] == LEASED and state[UNTIL] < now and state[ATTEMPTS] < suspect_after
end

local function is_head(id, state)
  if state[LANE] == '' then return true end
  return head(state[LANE]) == id and (skips_dead or not is_held(state))
end

local chosen, is_chosen = {}, {}

local function choose(id, state, is_suspect)
  chosen[#chosen + 1] = { id, state, is_suspect and 1 or 0 }
  is_chosen[id] = true
end

-- Take a head, and of its key as many of the next as may go with it.
local function take(id, state)
  choose(id, state)
  local lane = state[LANE]
  if lane == '' then return end
  local from, stop = by_seq(id, state), lane .. LAST
  if not skips_dead then
    stop = redis.call('ZRANGEBYLEX', tombs, '(' .. from, '(' .. stop, 'LIMIT', 0, 1)[1] or stop
  end
  while #chosen < limit do
    local count = math.min(limit - #chosen, PAGE)
    local followers = redis.call('ZRANGEBYLEX', lanes, '(' .. from, '(' .. stop, 'LIMIT', 0, count)
    for _, member in ipairs(followers) do
      local follower = member:sub(#lane + 9)
      local its = read(follower)
      if not its or not is_ready(its) then return end
      choose(follower, its)
      from = member
    end
    if #followers < count then return end
  end
end

-- What a worker did not come back for.
local suspect, suspect_state
local offset, scanned = 0, 0
while limit > 0 and #chosen < limit and scanned < SCANNED do
  local expired = redis.call('ZRANGEBYSCORE', leased, '-inf', '(' .. string.format('%.0f', now), 'LIMIT', offset, PAGE)
  for _, id in ipairs(expired) do
    local state = read(id)
    if not state or state[STATUS] ~= LEASED then
      redis.call('ZREM', leased, id) -- left behind by something that was cut short
      redis.call('HINCRBY', counters, 'orphans', 1)
      offset = offset - 1
    elseif not is_chosen[id] and #chosen < limit and is_ours(state) and is_head(id, state) then
      if is_ready(state) then
        take(id, state)
      elseif not suspect and state[ATTEMPTS] >= suspect_after and state[ATTEMPTS] < max_attempts then
        suspect, suspect_state = id, state
      end
    end
  end
  offset, scanned = offset + #expired, scanned + #expired
  if #expired < PAGE then break end
end

local function is_before(one, other)
  if is_newest_first then return one > other end
  return one < other
end

-- Heads of a topic that are due, beginning after where the last look ended.
local function heads(key, topic, count)
  local first, ended = struct.pack('>I2', topic), '(' .. struct.pack('>I2I8', topic, now + 1)
  if is_newest_first then
    if since ~= '' then ended = '(' .. first .. since end
    return redis.call('ZREVRANGEBYLEX', key, ended, '[' .. first, 'LIMIT', 0, count)
  end
  return redis.call('ZRANGEBYLEX', key, (since == '' and '[' or '(') .. first .. since, ended, 'LIMIT', 0, count)
end

-- What is due, of all topics, the oldest first or the newest.
local more = false
if #chosen < limit and not (suspect and is_suspects_turn) then
  local found = {}
  local room = limit - #chosen
  local size = tenant == '' and room or math.max(room, PAGE)
  for _, key in ipairs(skips_dead and { due, held } or { due }) do
    local numbers = topics_with_heads(key)
    size = math.max(1, math.min(size, math.ceil(SCANNED / math.max(#numbers, 1))))
    for _, topic in ipairs(numbers) do
      local members = heads(key, topic, size + 1)
      for _, member in ipairs(members) do
        found[#found + 1] = { member:sub(3), member, key }
      end
      if #members > size then
        -- What comes after the last that was looked at is not known, and may come before what others have.
        local last = members[#members]:sub(3)
        more = more and is_before(more, last) and more or last
      end
    end
  end
  table.sort(found, function(one, other) return is_before(one[1], other[1]) end)
  local ids = {}
  for place, one in ipairs(found) do
    if more and is_before(more, one[1]) then break end
    if place > SCANNED then -- thousands of topics may have one each
      more = found[SCANNED][1]
      break
    end
    ids[place] = one[1]:sub(17)
  end
  local read_at_once = #ids > 0 and redis.call('HMGET', states, unpack(ids)) or {}
  for place, id in ipairs(ids) do
    if #chosen >= limit then break end
    local at, member, key = struct.unpack('>I8', found[place][1]), found[place][2], found[place][3]
    local state = read_at_once[place] and cmsgpack.unpack(read_at_once[place])
    if not state or state[STATUS] ~= PENDING or state[DUE] ~= at then
      redis.call('ZREM', key, member) -- left behind by something that was cut short
      redis.call('HINCRBY', counters, 'orphans', 1)
    elseif not is_chosen[id] and is_ready(state) then
      take(id, state)
    end
  end
end

if suspect and limit > 0 and (#chosen == 0 or is_suspects_turn) then
  chosen = {}
  choose(suspect, suspect_state, true)
end

local answer = { #chosen == 0 and more or '' }
if #chosen == 0 then return answer end

-- What is stored of those that were chosen, as long as it fits; of a key they stand in their order, so its run is cut.
local PROBE = 8
local fitting, bytes = {}, 0

local function read_bodies(count)
  local ids = {}
  for place = #fitting + 1, math.min(#fitting + count, #chosen) do ids[#ids + 1] = chosen[place][1] end
  for _, body in ipairs(redis.call('HMGET', entries, unpack(ids))) do
    bytes = bytes + (body and #body or 0)
    if max_bytes and bytes > max_bytes and #fitting > 0 then return false end
    local one = chosen[#fitting + 1]
    one[4] = body or ''
    fitting[#fitting + 1] = one
  end
  return true
end

-- By what the first of them take, so that few large ones are read in vain.
local count = max_bytes and PROBE or #chosen
while read_bodies(count) and #fitting < #chosen and bytes < max_bytes do
  count = math.max(1, math.min(math.floor((max_bytes - bytes) / math.max(bytes / #fitting, 1)), #chosen))
end

table.sort(fitting, function(one, other) return one[2][SEQ] < other[2][SEQ] end)
for place, one in ipairs(fitting) do
  local id, state = one[1], one[2]
  if state[STATUS] == PENDING then
    later('ZREM', due, by_due(id, state))
    if state[LANE] ~= '' then later('ZREM', held, by_due(id, state)) end
    if state[ATTEMPTS] > 0 then later('ZREM', tried, id) end
    if is_parked(state) then later('ZREM', parked, by_parked(id, state)) end
  end
  state[STATUS], state[TOKEN], state[ATTEMPTS] = LEASED, state[TOKEN] + 1, state[ATTEMPTS] + 1
  -- What is leased together runs out a microsecond apart, and so comes again in its order.
  state[UNTIL], state[WORKER], state[CHANGED] = now + lease + place - 1, worker, now
  later('HSET', states, id, cmsgpack.pack(state))
  later('ZADD', leased, string.format('%.0f', state[UNTIL]), id)
  for _, part in ipairs({ id, one[4], state[ATTEMPTS], state[TOKEN] }) do answer[#answer + 1] = part end
  answer[#answer + 1] = string.format('%.0f', state[SEQ])
  answer[#answer + 1] = one[3]
end
flush()
return answer
