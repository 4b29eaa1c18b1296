-- A running task says how far its rows are.
-- KEYS  1 task hash   then per row: trajectory hash, job hash, events stream
-- ARGV  1 seq   2 at (ms)   then per row: step, steps
-- Reply {"void"} | {"ok", "1"|"0" per row}: "0" for one that waits for another seq or has ended, which
-- is passed over. The first write is a delete.
if redis.call('HGET', KEYS[1], 'state') ~= 'running' then return {'void'} end
local reply = {'ok'}
for r = 1, (#KEYS - 1) / 3 do
  local trajectory, job, events = KEYS[3 * r - 1], KEYS[3 * r], KEYS[3 * r + 1]
  local step, steps = ARGV[1 + 2 * r], ARGV[2 + 2 * r]
  reply[r + 1] = '0'
  if redis.call('HGET', trajectory, 'seq') == ARGV[1] then
    reply[r + 1] = '1'
    redis.call('HDEL', job, 'queue_position')
    redis.call('HSET', job, 'step', step, 'progress', string.format('%.3f', step / steps))
    redis.call('XADD', events, 'MAXLEN', '~', 256, '*', 'type', 'step', 'step', step, 'steps', steps,
      'at', ARGV[2])
  end
end
return reply
