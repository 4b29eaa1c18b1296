-- What a task failed of, in full, for whoever looks into it; its report has one line for the user.
-- KEYS  1 trajectory hash
-- ARGV  1 seq   2 trace
-- Reply {"noted"} | {"late"}: the job waits for another task. The first write is a delete.
if redis.call('HGET', KEYS[1], 'seq') ~= ARGV[1] then return {'late'} end
redis.call('HDEL', KEYS[1], 'trace')
redis.call('HSET', KEYS[1], 'trace', ARGV[2])
return {'noted'}
