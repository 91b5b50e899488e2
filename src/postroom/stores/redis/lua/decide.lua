-- End a ticket as expired, if it is due, ends when the caller believes and was not revoked; and store the event.
-- ARGV: the ticket, when it ends, whether the caller knows that it was revoked, the last millisecond at which it may end
-- or nothing, and the event, as for enqueue.lua.
-- Answers what was done, or why nothing was.
local ticket, expires, is_revoked, cutoff = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local status, there = look(ticket)
if status == REVOKED then return { 'revoked' } end
if status == EXPIRED and there == expires then return { 'duplicate' } end
if status ~= OPEN then return { 'stale' } end
if there ~= expires then return { 'stale', there } end
if tonumber(expires) * 1000 > now or (cutoff and tonumber(expires) > cutoff) then return { 'not due' } end
if is_revoked == '1' then
  finish(ticket, REVOKED, expires)
  return { 'revoked' }
end
return tell(ticket, EXPIRED, expires, 5)
