-- Take, keep or give up leadership.
-- KEYS  1 leader string
-- ARGV  1 nonce   2 lease (ms); 0 gives it up
-- Reply {"leading"|"standby"|"released"}
local now = redis.call('GET', KEYS[1])
if ARGV[2] == '0' then
  if now == ARGV[1] then redis.call('DEL', KEYS[1]) end
  return {'released'}
end
if now and now ~= ARGV[1] then return {'standby'} end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {'leading'}
