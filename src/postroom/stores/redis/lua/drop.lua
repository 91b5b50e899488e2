-- Give a claim up, so that whatever is still on its way for it is refused.
-- KEYS[1] is the mark, ARGV the token of the claim, what the mark holds before the commit, nothing if it is not there,
-- and for how many milliseconds a commit may still be on its way.
-- Answers DROPPED; DONE or PARTIAL if the commit came first; LOST if the claim is somebody else's or ended.
local mark, token, expected, late = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local kind = redis.call('TYPE', mark).ok
if kind ~= 'none' and kind ~= 'string' then return { 'LOST' } end
local state = redis.call('GET', mark) or ''
if state == 'done:' .. token then return { 'DONE' } end
if state:find('partial:' .. token, 1, true) == 1 then return { 'PARTIAL', state:match('^%S* ?(.*)$') } end
if state ~= expected then return { state == 'void:' .. token and 'DROPPED' or 'LOST' } end
if expected == '' then
  redis.call('SET', mark, 'void:' .. token, 'PX', late)
else
  redis.call('DEL', mark)
end
return { 'DROPPED' }
