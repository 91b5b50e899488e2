-- Apply everything that a transaction has recorded, or nothing if it can be known before that something would fail.
--
-- KEYS: the mark; the keys of each outbox that is added to; the keys of all commands.
-- ARGV: the token; what the mark must hold now, nothing if it must not be there; for how many milliseconds it is kept
-- when all is done; how many commands there are, and for each of them how many words, what its key has to hold and the
-- words; how many outboxes, and for each of them how many keys, how many arguments and those.
-- Answers OK, also if it was done before; FENCED if the mark is not as it must be; BADTYPE, BADVALUE, NOPERM or REFUSED
-- and why, with nothing applied; or PARTIAL and why, of which the mark tells from then on.
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

-- What keys and fields will hold by the time a command comes, as far as this transaction changes them; and of which keys
-- it is not known whether they will be there.
local kinds, values, is_new, is_unsure = {}, {}, {}, {}

local function kind_of(key)
  kinds[key] = kinds[key] or redis.call('TYPE', key).ok
  return kinds[key]
end

local function become(key, new_kind)
  kinds[key], values[key], is_new[key], is_unsure[key] = new_kind, {}, true, nil
end

local function note(key, field, value)
  values[key] = values[key] or {}
  values[key][field or 1] = value
end

-- What is longer than any integer is none, and may be too long to be looked at.
local LONGEST, TEXT = 20, 'a text'

local function value_of(key, field)
  local known = values[key] and values[key][field or 1]
  if known ~= nil then return known end
  if is_new[key] or kind_of(key) == 'none' then return false end
  if field then return redis.call('HSTRLEN', key, field) > LONGEST and TEXT or redis.call('HGET', key, field) end
  return redis.call('STRLEN', key) > LONGEST and TEXT or redis.call('GET', key)
end

local function is_integer(value)
  if not value or value == '0' then return true end
  local sign, digits = value:match('^(%-?)([1-9]%d*)$')
  local most = sign == '-' and '9223372036854775808' or '9223372036854775807'
  return digits and (#digits < 19 or #digits == 19 and digits <= most)
end

-- What each command does to that, and what is wrong with it, nothing if it can be applied; the others only need their key
-- to hold the right kind of value.
local foresee = {}
local clock = redis.call('TIME')
local now = clock[1] * 1000 + clock[2] / 1000

function foresee.DEL(words)
  for number = 2, #words do become(words[number], 'none') end
end

foresee.UNLINK = foresee.DEL

function foresee.SET(words)
  local is_there = kind_of(words[2]) ~= 'none'
  for number = 4, #words do
    local word = words[number]
    if (word == 'NX' or word == 'XX') and is_unsure[words[2]] then
      return 'it cannot be foreseen whether it will be there when SET comes'
    end
    if word == 'NX' and is_there or word == 'XX' and not is_there then return end
  end
  become(words[2], 'string')
  note(words[2], nil, words[3])
end

function foresee.HSET(words)
  for number = 3, #words, 2 do note(words[2], words[number], words[number + 1]) end
end

function foresee.HSETNX(words)
  if not value_of(words[2], words[3]) then note(words[2], words[3], words[4]) end
end

function foresee.HDEL(words)
  for number = 3, #words do note(words[2], words[number], false) end
  is_unsure[words[2]] = true -- what is empty then is gone
end

function foresee.SREM(words)
  is_unsure[words[2]] = true
end

foresee.ZREM = foresee.SREM

function foresee.ZADD(words)
  if words[3] == 'XX' then is_unsure[words[2]] = true end -- it makes no key
end

-- A time that is over deletes the key at once.
local function expiring(unit, since)
  return function(words)
    if words[3] * unit + since <= now then become(words[2], 'none') end
  end
end

foresee.EXPIRE, foresee.PEXPIRE = expiring(1000, now), expiring(1, now)
foresee.EXPIREAT, foresee.PEXPIREAT = expiring(1000, 0), expiring(1, 0)

local function adding(name, value)
  if not is_integer(value) then return 'what ' .. name .. ' would add to is no integer' end
end

function foresee.HINCRBY(words)
  local wrong = adding(words[1], value_of(words[2], words[3]))
  note(words[2], words[3], '0')
  return wrong
end

function foresee.INCRBY(words)
  local wrong = adding(words[1], value_of(words[2]))
  note(words[2], nil, '0')
  return wrong
end

foresee.DECRBY = foresee.INCRBY

function foresee.APPEND(words)
  note(words[2], nil, (value_of(words[2]) or '') .. words[3])
end

-- Whether all of it can be applied.
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
  local wrong = foresee[words[1]] and foresee[words[1]](words)
  if wrong then return { 'BADVALUE', words[2], wrong } end
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
