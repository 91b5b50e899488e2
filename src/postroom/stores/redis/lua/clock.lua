-- Returns the seconds and microseconds of the server that has KEYS[1].
return redis.call('TIME')
