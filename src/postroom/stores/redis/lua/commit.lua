-- Apply everything that a transaction has recorded, or nothing if a check before the first write finds that a part of it
-- would fail: the mark, the type of every key, and the permissions of the user. Values are not checked. A command that
-- fails by one, such as INCRBY of a text, fails when it is applied; what was applied before it stays.
--
-- KEYS: the mark; the keys of each outbox that is added to; the keys of all commands.
-- ARGV: the token; what the mark must hold now, nothing if it must not be there; for how many milliseconds it is kept
-- when all is done; how many commands there are, and for each of them how many words, what its key has to hold and the
-- words; how many outboxes, and for each of them how many keys, how many arguments and those.
-- Answers OK, also if it was done before; FENCED if the mark is not as it must be; BADTYPE, UNDECIDED, NOPERM or REFUSED
-- and why, with nothing applied; or PARTIAL and why, which the mark holds from then on.
--
-- `check` and `enqueue` stand before this script as functions.
local mark, token, expected, kept = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local next_word, next_key = 4, 2

local function take()
  next_word = next_word + 1
  return ARGV[next_word - 1]
end

local function take_words(count)
  local words = {}
  for number = 1, count do words[number] = take() end
  return words
end

-- Whose turn it is.
local kind = redis.call('TYPE', mark).ok
if kind ~= 'none' and kind ~= 'string' then return { 'BADTYPE', mark, 'a ' .. kind .. ', and should be a string' } end
local state = redis.call('GET', mark) or ''
if state == 'done:' .. token then return { 'OK' } end
if state:find('partial:' .. token, 1, true) == 1 then return { 'PARTIAL', state:match('^%S* ?(.*)$') } end
if state ~= expected then return { 'FENCED' } end

-- The type that a key will have when a command runs, as far as earlier commands of this transaction change it; and which
-- keys may be missing by then, depending on values.
local kinds, may_be_missing = {}, {}

local function kind_of(key)
  kinds[key] = kinds[key] or redis.call('TYPE', key).ok
  return kinds[key]
end

local function become(key, kind)
  kinds[key], may_be_missing[key] = kind, nil
end

-- Commands that change the type of a key in another way than by making it.
local foresee = {}
local clock = redis.call('TIME')
local now = clock[1] * 1000 + clock[2] / 1000

function foresee.DEL(words)
  for number = 2, #words do become(words[number], 'none') end
end

foresee.UNLINK = foresee.DEL

-- Returns the condition if it cannot be known what the key will be.
function foresee.SET(words)
  local key, condition = words[2], words[4]
  local is_there = kind_of(key) ~= 'none'
  if condition == 'NX' or condition == 'XX' then
    if may_be_missing[key] then return condition end
    if is_there == (condition == 'NX') then return end
  end
  become(key, 'string')
end

-- A key whose last element is removed is gone.
function foresee.HDEL(words)
  may_be_missing[words[2]] = true
end

foresee.SREM, foresee.ZREM = foresee.HDEL, foresee.HDEL

function foresee.ZADD(words)
  if words[3] == 'XX' then may_be_missing[words[2]] = true end -- it makes no key
end

-- A time that is over deletes the key at once.
local function expiring(unit, since)
  return function(words)
    if words[3] * unit + since <= now then become(words[2], 'none') end
  end
end

foresee.EXPIRE, foresee.PEXPIRE = expiring(1000, now), expiring(1, now)
foresee.EXPIREAT, foresee.PEXPIREAT = expiring(1000, 0), expiring(1, 0)

-- Whether all types fit, and everything is permitted.
local is_allowed = redis.acl_check_cmd or function() return true end
local commands = {}
for number = 1, tonumber(take()) do
  local count, needed, is_made = tonumber(take()), take():match('^(%a*)(%+?)$')
  local words = take_words(count)
  local there = needed ~= '' and kind_of(words[2]) or 'none'
  if there ~= 'none' and there ~= needed then
    return { 'BADTYPE', words[2], 'a ' .. there .. ', and ' .. words[1] .. ' needs a ' .. needed }
  end
  if not is_allowed(unpack(words)) then return { 'NOPERM', words[2], words[1] } end
  if is_made == '+' and there == 'none' then kinds[words[2]] = needed end
  local undecided = foresee[words[1]] and foresee[words[1]](words)
  if undecided then return { 'UNDECIDED', words[2], words[1] .. ' ' .. undecided } end
  commands[number] = words
end
local outboxes = {}
for number = 1, tonumber(take()) do
  local keys, key_count, word_count = {}, tonumber(take()), tonumber(take())
  for place = 1, key_count do keys[place] = KEYS[next_key + place - 1] end
  next_key = next_key + key_count
  outboxes[number] = { keys = keys, words = take_words(word_count) }
  for _, name in ipairs({ 'HSET', 'ZADD' }) do
    if not is_allowed(name, keys[1], '0', '0') then return { 'NOPERM', keys[1], name } end
  end
  local problem = check(keys)
  if problem then return { 'REFUSED', problem.err } end
  -- That has looked at the types of now, which commands must not change.
  for _, key in ipairs(keys) do
    local later = kinds[key] or 'none'
    if later ~= 'none' and later ~= redis.call('TYPE', key).ok then
      return { 'BADTYPE', key, 'a key of the outbox, and a command of the transaction makes it a ' .. later }
    end
  end
end

-- The mark says from now on that something may have happened. If the server refuses to write at all, it refuses this.
local answer = redis.pcall('SET', mark, 'partial:' .. token)
if type(answer) == 'table' and answer.err then return redis.error_reply(answer.err) end

local function stop(done, problem)
  if type(problem) == 'table' then problem = problem.err end
  problem = tostring(problem)
  if done > 0 then
    local why = done .. ' of ' .. #commands + #outboxes .. ' applied: ' .. problem
    redis.call('SET', mark, 'partial:' .. token .. ' ' .. why)
    return { 'PARTIAL', why }
  end
  -- Nothing has happened, and the claim is given up.
  redis.call('DEL', mark)
  return { 'REFUSED', problem }
end

for number, words in ipairs(commands) do
  answer = redis.pcall(unpack(words))
  if type(answer) == 'table' and answer.err then return stop(number - 1, answer) end
end
for number, outbox in ipairs(outboxes) do
  local is_fine, said = pcall(enqueue, outbox.keys, outbox.words)
  -- What it answers with an error it has not begun; what breaks off has done something.
  if not is_fine then return stop(#commands + number, said) end
  if said.err then return stop(#commands + number - 1, said) end
end
redis.call('SET', mark, 'done:' .. token, 'PX', kept)
return { 'OK' }
