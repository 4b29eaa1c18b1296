-- A worker says that it is there, and, the first time, tells the coordinator.
-- KEYS  1 worker hash   2 workers set   3 manifests hash   4 reports stream   5 tasks stream
-- ARGV  1 name   2 lease (ms)   3 manifest field   4 manifest JSON   then field, value of the worker hash
-- Reply {"new"|"renewed"}. The first write is a delete: at maxmemory a lease must not run out.
local known = redis.call('EXISTS', KEYS[1])
local pairs_ = {}
for i = 5, #ARGV do pairs_[#pairs_ + 1] = ARGV[i] end
redis.call('HDEL', KEYS[1], 'beat')
redis.call('HSET', KEYS[1], unpack(pairs_))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[5], 10 * ARGV[2])
if known == 1 then return {'renewed'} end
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('HSET', KEYS[3], ARGV[3], ARGV[4])
redis.call('XADD', KEYS[4], '*', 'kind', 'hello', 'worker', ARGV[1])
return {'new'}
