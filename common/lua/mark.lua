-- Write into a worker's record what it hangs on, or that it hangs no more.
-- KEYS  1 leader string   2 worker hash
-- ARGV  1 nonce   2 seq of the task, "deaf", or "" for none
-- Reply {"marked"} | {"gone"}: its lease ran out | {"fenced"}. The first write is a delete.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'fenced'} end
if redis.call('EXISTS', KEYS[2]) == 0 then return {'gone'} end
redis.call('HDEL', KEYS[2], 'hung')
if ARGV[2] ~= '' then redis.call('HSET', KEYS[2], 'hung', ARGV[2]) end
return {'marked'}
