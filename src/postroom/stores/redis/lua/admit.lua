-- Claim a message for one who is about to handle it.
-- KEYS[1] is its mark, ARGV the token of the claim and how many milliseconds it is leased.
-- Answers CLAIMED; DONE if it was handled; BUSY and for how long somebody else still has it, -1 for no end; or
-- QUARANTINED and why. What stands there otherwise is none of ours, and an error.
local mark, token, lease = KEYS[1], ARGV[1], ARGV[2]
local kind = redis.call('TYPE', mark).ok
if kind ~= 'none' and kind ~= 'string' then
  return redis.error_reply('WRONGTYPE ' .. mark .. ' is a ' .. kind .. ', and should be a string')
end
local state = redis.call('GET', mark)
if not state then
  redis.call('SET', mark, 'p:' .. token, 'PX', lease)
  return { 'CLAIMED' }
end
local word, rest = state:match('^(%a+):(.*)$')
if word == 'done' then return { 'DONE' } end
if word == 'p' then
  -- One's own claim, whose answer was lost.
  if rest == token then return { 'CLAIMED' } end
  return { 'BUSY', redis.call('PTTL', mark) }
end
if word == 'partial' then return { 'QUARANTINED', rest:match('^%S* ?(.*)$') } end
return redis.error_reply('WRONGTYPE ' .. mark .. ' holds what no inbox has written there')
