-- Have a ticket that has not ended end at another time.
-- ARGV: the ticket, and when it ends. Answers how it stands, or that it is not known.
local ticket, expires = ARGV[1], ARGV[2]
local status = look(ticket)
if not status then return { 'stale' } end
if status == OPEN then place(ticket, expires) end
return { WORDS[status] }
