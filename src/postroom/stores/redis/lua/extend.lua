-- Lease claims anew from now on.
-- ARGV: the lease; then for each claim its id and its token. Answers the numbers of those that were lost.
local lost = {}
for first = 2, #ARGV, 2 do
  local id = ARGV[first]
  local state = read(id)
  if state and state[STATUS] == LEASED and state[TOKEN] == tonumber(ARGV[first + 1]) then
    state[UNTIL] = now + ARGV[1] + first / 2 - 1
    write(id, state)
    redis.call('ZADD', leased, state[UNTIL], id)
  else
    lost[#lost + 1] = first / 2
  end
end
return lost
