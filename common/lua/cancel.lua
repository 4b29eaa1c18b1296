-- Take note of a cancel request, also for a job that has not arrived yet.
-- KEYS  1 leader string   2 cancel stream   3 job hash   4 trajectory hash   5 canceled string
-- ARGV  1 nonce   2 entry id   3 ttl of an early cancel (ms)
-- Reply {"canceling"|"terminal"|"early"|"fenced"}; finish does the rest. The first write is a delete.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'fenced'} end
redis.call('XDEL', KEYS[2], ARGV[2])
if redis.call('EXISTS', KEYS[4]) == 1 then
  redis.call('HSET', KEYS[4], 'cancel', '1')
  return {'canceling'}
end
if redis.call('EXISTS', KEYS[3]) == 1 then return {'terminal'} end
redis.call('SET', KEYS[5], '1', 'PX', ARGV[3])
return {'early'}
