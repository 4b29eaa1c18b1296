-- Ask one worker to end its chunk at the next step, hand back what is queued, and leave.
-- KEYS  1 worker hash   2 its stream
-- ARGV  none
-- Reply {"asked"} | {"draining"}: it was asked already | {"gone"}: there is no such worker
-- A repeat is heard twice, which changes nothing. The first write is a delete (maxmemory).
local draining = redis.call('HGET', KEYS[1], 'draining')
if not draining then return {'gone'} end
if draining == '1' then return {'draining'} end
redis.call('HDEL', KEYS[1], 'drain')
redis.call('XADD', KEYS[2], '*', 'kind', 'drain')
if redis.call('PTTL', KEYS[2]) < 0 then
  redis.call('PEXPIRE', KEYS[2], 10 * math.max(1000, redis.call('PTTL', KEYS[1])))
end
return {'asked'}
