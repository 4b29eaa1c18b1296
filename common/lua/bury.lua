-- End a job whose trajectory is gone, since nobody can go on with it; its clients wait for an end.
-- KEYS  1 active set   2 trajectory hash   3 job hash   4 result string   5 events stream
-- ARGV  1 id   2 "1" does it, "0" only says   3 result bytes   4 at (ms)   5 job ttl   6 result ttl (ms)
--       7 error code   8 error
-- Reply {"live"} | {"listed"}: it can go on, and was not in the set | {"ended"} | {"dropped"}: its name
-- was all that was left | {"gone"}: there is nothing to end. The first write is a delete, or one member.
local is_listed = redis.call('SISMEMBER', KEYS[1], ARGV[1]) == 1
local acts = ARGV[2] == '1'
if redis.call('EXISTS', KEYS[2]) == 1 then
  if is_listed then return {'live'} end
  if acts then redis.call('SADD', KEYS[1], ARGV[1]) end
  return {'listed'}
end
local is_open = redis.call('HGET', KEYS[3], 'is_terminal') == '0'
if not is_open then
  if not is_listed then return {'gone'} end
  if acts then redis.call('SREM', KEYS[1], ARGV[1]) end
  return {'dropped'}
end
if acts then
  redis.call('SREM', KEYS[1], ARGV[1])
  redis.call('HDEL', KEYS[3], 'queue_position', 'eta', 'as_of', 'slack')
  redis.call('SET', KEYS[4], ARGV[3], 'PX', ARGV[6], 'NX')
  redis.call('HSET', KEYS[3], 'status', 'failed', 'is_terminal', '1', 'finished', ARGV[4],
    'error_code', ARGV[7], 'error', ARGV[8])
  redis.call('PEXPIRE', KEYS[3], ARGV[5])
  redis.call('XADD', KEYS[5], 'MAXLEN', '~', 256, '*', 'type', 'failed', 'error_code', ARGV[7], 'at', ARGV[4])
  redis.call('PEXPIRE', KEYS[5], ARGV[6])
end
return {'ended'}
