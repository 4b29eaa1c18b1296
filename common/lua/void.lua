-- Take a task back: while it is still queued, or (forced) from a worker that is gone.
-- KEYS  1 leader string   2 task hash   then M member streams,
--       then per row: trajectory hash, job hash, events stream
-- ARGV  1 nonce   2 seq   3 "0" only if queued, "1" also if running, "2" and blame it: a task that
--       had started counts as an attempt of its rows   4 record ttl (ms)   5 M   6 at (ms)
-- Reply {"void", blamed "1"|"0"} | {"late"} | {"fenced"}; its rows wait for no seq any more.
-- The first write is a delete.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'fenced'} end
local record = redis.call('HMGET', KEYS[2], 'state', 'entries', 'blamed')
local state, M = record[1], tonumber(ARGV[5])
if state == 'void' then return {'void', record[3] or '0'} end
if state == 'done' then return {'late'} end
if state == 'running' and ARGV[3] == '0' then return {'late'} end
local blamed = (state == 'running' and ARGV[3] == '2') and '1' or '0'
redis.call('HDEL', KEYS[2], 'entries')
local m = 0
for entry in string.gmatch(record[2] or '', '%S+') do
  m = m + 1
  redis.call('XDEL', KEYS[2 + m], entry)
end
for k = 3 + M, #KEYS, 3 do
  if redis.call('HGET', KEYS[k], 'seq') == ARGV[2] then
    redis.call('HSET', KEYS[k], 'seq', '0')
    if blamed == '1' then
      local attempts = redis.call('HINCRBY', KEYS[k], 'attempts', 1)
      redis.call('HSET', KEYS[k + 1], 'attempts', attempts)
      redis.call('XADD', KEYS[k + 2], 'MAXLEN', '~', 256, '*', 'type', 'worker_lost', 'at', ARGV[6])
    end
  end
end
redis.call('HSET', KEYS[2], 'state', 'void', 'blamed', blamed)
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return {'void', blamed}
