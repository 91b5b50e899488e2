-- Lease a message anew to the one who has it.
-- KEYS[1] is its mark, ARGV the token of the claim and for how many milliseconds. Answers 1, or 0 if the claim is lost.
if redis.call('TYPE', KEYS[1]).ok ~= 'string' or redis.call('GET', KEYS[1]) ~= 'p:' .. ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
