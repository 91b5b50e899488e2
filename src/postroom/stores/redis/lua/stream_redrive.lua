-- Have dead messages tried again from their first attempt on, the oldest first, each as a new entry of the stream.
-- ARGV: the group, how many bytes a small entry has at most, and how many are tried at most.
-- Answers how many will be tried, and how many were looked at.
local OURS = { ['postroom:entry'] = true, ['postroom:attempts'] = true, ['postroom:error'] = true, ['postroom:time'] = true }
local found = redis.call('XRANGE', dead, '-', '+', 'COUNT', ARGV[3])
local count = 0
for _, one in ipairs(found) do
  local fields, entry = {}, nil
  for number = 1, #one[2], 2 do
    local name, value = one[2][number], one[2][number + 1]
    if name == 'postroom:entry' then entry = value end
    if not OURS[name] then fields[#fields + 1], fields[#fields + 2] = name, value end
  end
  -- Of an entry that was deleted nothing is left to be tried.
  if #fields > 0 then
    if size_of(fields) > tonumber(ARGV[2]) then expect_large(0) end
    redis.call('XADD', stream, '*', unpack(fields))
    count = count + 1
  end
  redis.call('XDEL', dead, one[1])
  if entry then redis.call('HDEL', graves, entry) end
end
return { count, #found }
