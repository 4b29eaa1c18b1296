-- Ask a task to end at its next step boundary. Sticky: a task not yet started runs no step more
-- than it must.
-- KEYS  1 leader string   2 task hash   then member streams
-- ARGV  1 nonce   2 seq
-- Reply {"asked"|"late"|"fenced"}. A member that has left has no stream, and gets none again. The
-- first write is a delete.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'fenced'} end
local record = redis.call('HMGET', KEYS[2], 'state', 'yield')
if record[1] ~= 'queued' and record[1] ~= 'running' then return {'late'} end
if record[2] == '1' then return {'asked'} end
redis.call('HDEL', KEYS[2], 'yield')
redis.call('HSET', KEYS[2], 'yield', '1')
for m = 3, #KEYS do
  if redis.call('EXISTS', KEYS[m]) == 1 then
    redis.call('XADD', KEYS[m], '*', 'kind', 'yield', 'seq', ARGV[2])
  end
end
return {'asked'}
