-- Note down when a ticket ends, unless it is known.
-- ARGV: the ticket, and when it ends. Answers how it stands; or that it ends at another time, and when.
local ticket, expires = ARGV[1], ARGV[2]
local status, there = look(ticket)
if status == OPEN and there ~= expires then return { 'stale', there } end
if not status then place(ticket, expires) end
return { WORDS[status or OPEN] }
