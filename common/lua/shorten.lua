-- Have a job that waits, and has done no step yet, do fewer steps.
-- KEYS  1 leader string   2 trajectory hash   3 job hash   4 events stream
-- ARGV  1 nonce   2 spec   3 steps   4 at (ms)
-- Reply {"shortened"} | {"late"}: it waits for a task, has begun, or has ended | {"fenced"}
-- A repeat changes nothing. The first write is a delete.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'fenced'} end
local have = redis.call('HMGET', KEYS[2], 'seq', 'step', 'spec')
if have[1] ~= '0' or have[2] ~= '0' then return {'late'} end
if have[3] == ARGV[2] then return {'shortened'} end
redis.call('HDEL', KEYS[3], 'queue_position')
redis.call('HSET', KEYS[2], 'spec', ARGV[2])
redis.call('HSET', KEYS[3], 'steps', ARGV[3])
redis.call('XADD', KEYS[4], 'MAXLEN', '~', 256, '*', 'type', 'degraded', 'steps', ARGV[3], 'at', ARGV[4])
return {'shortened'}
