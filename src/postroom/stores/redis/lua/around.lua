-- Run a script of the user's own, which may store messages together with what else it does.
-- KEYS: how many of them are the store's is the first argument; the user's own come after those.
-- ARGV: that; how many words the messages take; these, as for enqueue.lua; and the user's own.
--
-- `check`, `enqueue` and `own` stand before this script as functions.
local key_count, word_count = tonumber(ARGV[1]), tonumber(ARGV[2])

local function part(list, first, last)
  local items = {}
  for place = first, last do items[#items + 1] = list[place] end
  return items
end

local keys, words = part(KEYS, 1, key_count), part(ARGV, 3, word_count + 2)
-- Before the user's first write, so that nothing is done by half.
local problem = check(keys)
if problem then return problem end
return own(part(KEYS, key_count + 1, #KEYS), part(ARGV, word_count + 3, #ARGV), function()
  return enqueue(keys, words)
end)
