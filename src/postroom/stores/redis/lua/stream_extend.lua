-- Lease claims anew from now on.
-- ARGV: the group, the lease in milliseconds, and for each claim its entry and token, with blanks between them.
-- Answers the numbers of those that were lost.
local lease, lost, number = ARGV[2], {}, 0
begin()
for entry, token in ARGV[3]:gmatch('(%S+) (%S+)') do
  number = number + 1
  local name, count = holder(entry)
  if name and name ~= WAITING and base + count == tonumber(token) then
    -- The name says how long its leases are.
    local holds = name:gsub('|%d+$', '') .. '|' .. lease
    if #redis.call('XCLAIM', stream, group, holds, 0, entry, 'RETRYCOUNT', count, 'JUSTID') == 0 then
      mourn(entry, count)
    else
      redis.call('ZADD', leases, 'NX', whole(now + lease * 1000), holds)
    end
  else
    lost[#lost + 1] = number
  end
end
return lost
