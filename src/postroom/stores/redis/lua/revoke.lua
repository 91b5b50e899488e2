-- End a ticket as revoked, unless it has ended, and store the event.
-- ARGV: the ticket, and the event, as for enqueue.lua. Answers what was done, or why nothing was.
local ticket = ARGV[1]
local status, expires = look(ticket)
if not status then return { 'stale' } end
if status ~= OPEN then return { WORDS[status] } end
return tell(ticket, REVOKED, expires, 2)
