-- What came of one try to deliver: it is done, to be tried again, or given up.
-- KEYS  1 sender string   2 deliveries sorted set   3 delivery hash   4 outbox stream
-- ARGV  1 nonce   2 name   3 "done"|"again"|"given_up"   4 when to try again (ms)   5 error
--       6 ttl of one that is given up (ms)   7 job   8 body of the outbox entry that follows, or ""
-- Reply {"settled"|"gone"|"fenced"}; gone: it was settled before. The first write is a delete.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'fenced'} end
if redis.call('ZREM', KEYS[2], ARGV[2]) == 0 then return {'gone'} end
if ARGV[3] == 'done' then
  redis.call('DEL', KEYS[3])
elseif redis.call('EXISTS', KEYS[3]) == 1 then
  redis.call('HINCRBY', KEYS[3], 'attempts', 1)
  redis.call('HSET', KEYS[3], 'error', ARGV[5])
  if ARGV[3] == 'again' then
    redis.call('ZADD', KEYS[2], ARGV[4], ARGV[2])
  else
    redis.call('HSET', KEYS[3], 'given_up', '1')
    redis.call('PEXPIRE', KEYS[3], ARGV[6])
  end
end
if ARGV[8] ~= '' then redis.call('XADD', KEYS[4], '*', 'job', ARGV[7], 'body', ARGV[8]) end
return {'settled'}
