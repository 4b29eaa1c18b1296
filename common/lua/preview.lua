-- A small picture of a job that has not ended takes the place of the one before.
-- KEYS  1 trajectory hash   2 preview hash
-- ARGV  1 step   2 bytes   3 ttl (ms)
-- Reply {"shown"} | {"gone"}: the job has ended. A repeat overwrites.
-- The first write is an HSET, so that a Redis at maxmemory refuses it.
if redis.call('EXISTS', KEYS[1]) == 0 then return {'gone'} end
redis.call('HSET', KEYS[2], 'step', ARGV[1], 'image', ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return {'shown'}
