-- Compare some tickets with what is indexed, and mend what does not agree. Like repair.lua, it should find nothing.
-- ARGV: whether to look through `tickets` or `expiries`, where to go on, and about how many to look at.
-- Answers where to go on, and how many were mended.
local which, from, count = ARGV[1], ARGV[2], ARGV[3]
local mended = 0

-- A ticket that is known: where it stands follows from how it stands.
local function compare(ticket)
  local status, expires = look(ticket)
  if not WORDS[status] or not tonumber(expires) then return end -- nobody knows what it was
  local at, ended = redis.call('ZSCORE', expiries, ticket), redis.call('ZSCORE', endings, ticket)
  if status ~= OPEN and (at or not ended) then
    finish(ticket, status, expires)
    mended = mended + 1
  elseif status == OPEN and (ended or not at or tonumber(at) ~= tonumber(expires)) then
    place(ticket, expires)
    redis.call('ZREM', endings, ticket)
    mended = mended + 1
  end
end

-- A ticket that ends at a time, and is not known: what has ended is taken from there, so it was open.
local function restore(ticket, at)
  if look(ticket) then return end
  place(ticket, string.format('%.0f', at))
  mended = mended + 1
end

local page
if which == 'tickets' then
  page = redis.call('HSCAN', tickets, from, 'COUNT', count)
  for number = 1, #page[2], 2 do compare(page[2][number]) end
else
  page = redis.call('ZSCAN', expiries, from, 'COUNT', count)
  for number = 1, #page[2], 2 do restore(page[2][number], page[2][number + 1]) end
end
if mended > 0 then redis.call('HINCRBY', counters, 'mended', mended) end
return { page[1], mended }
