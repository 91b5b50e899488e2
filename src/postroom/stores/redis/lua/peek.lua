-- Show messages that claims would bring next; nothing is written.
-- ARGV: how many, and the topic or nothing.
-- Answers what time it is, and then for each message its id, what is stored of it, its attempts, token and seq, and since
-- when it is due.
local SCANNED = 2000
local limit, name = tonumber(ARGV[1]), ARGV[2]
local answer = { string.format('%.0f', now) }
local wanted = name ~= '' and tonumber(redis.call('HGET', topics, name) or nil)
if limit < 1 or (name ~= '' and not wanted) then return answer end

local function is_ready(state)
  if state[STATUS] == PENDING then return state[DUE] <= now end
  return state[STATUS] == LEASED and state[UNTIL] < now
end

local chosen, is_chosen = {}, {}

local function choose(id, state)
  chosen[#chosen + 1] = { id, state }
  is_chosen[id] = true
end

-- Show a message that nothing holds back, and of its key as many of the next as would go with it.
local function take(id, state)
  if is_chosen[id] or #chosen >= limit or (wanted and state[TOPIC] ~= wanted) then return end
  choose(id, state)
  local lane = state[LANE]
  if lane == '' or #chosen >= limit then return end
  local from, stop = by_seq(id, state), lane .. LAST
  stop = redis.call('ZRANGEBYLEX', tombs, '(' .. from, '(' .. stop, 'LIMIT', 0, 1)[1] or stop
  for _, member in ipairs(redis.call('ZRANGEBYLEX', lanes, '(' .. from, '(' .. stop, 'LIMIT', 0, limit - #chosen)) do
    local follower = member:sub(#lane + 9)
    local its = read(follower)
    if not its or not is_ready(its) then return end
    choose(follower, its)
  end
end

-- What a worker did not come back for.
local late = '(' .. string.format('%.0f', now)
for _, id in ipairs(redis.call('ZRANGEBYSCORE', leased, '-inf', late, 'LIMIT', 0, SCANNED)) do
  if #chosen >= limit then break end
  local state = read(id)
  local is_first = state and (state[LANE] == '' or (head(state[LANE]) == id and not is_held(state)))
  if is_first and state[STATUS] == LEASED then take(id, state) end
end

-- What is due, of all topics, the oldest first. Parked messages whose time has come have a topic of their own.
local numbers, found, more = {}, {}, false
for _, number in ipairs(topics_with_heads(due)) do
  if not wanted or number == wanted or number == PARKED_TOPIC then numbers[#numbers + 1] = number end
end
local size = math.max(1, math.min(wanted and SCANNED or limit, math.ceil(SCANNED / math.max(#numbers, 1))))
for _, number in ipairs(numbers) do
  local from, to = '[' .. struct.pack('>I2', number), '(' .. struct.pack('>I2I8', number, now + 1)
  local members = redis.call('ZRANGEBYLEX', due, from, to, 'LIMIT', 0, size)
  for _, member in ipairs(members) do found[#found + 1] = member:sub(3) end
  if #members == size then
    -- What comes after the last that was looked at is not known, and may be older than what others have.
    local last = members[size]:sub(3)
    more = more and more < last and more or last
  end
end
table.sort(found)
for _, place in ipairs(found) do
  if #chosen >= limit or (more and place > more) then break end
  local id = place:sub(17)
  local state = read(id)
  if state and state[STATUS] == PENDING and is_ready(state) then take(id, state) end
end

table.sort(chosen, function(one, other) return one[2][SEQ] < other[2][SEQ] end)
for _, one in ipairs(chosen) do
  local id, state = one[1], one[2]
  for _, part in ipairs({ id, redis.call('HGET', entries, id) or '', state[ATTEMPTS], state[TOKEN] }) do
    answer[#answer + 1] = part
  end
  answer[#answer + 1] = string.format('%.0f', state[SEQ])
  answer[#answer + 1] = string.format('%.0f', state[DUE])
end
return answer
