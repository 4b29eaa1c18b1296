-- A member begins a task: queued -> running, and the task leaves the member's stream.
-- KEYS  1 task hash   2 member's stream   then per row: trajectory hash, job hash, events stream
-- ARGV  1 seq   2 member   3 entry id   4 at (ms)   5 stage
-- Reply {"running", yield "0"|"1", live flags "1"|"0" per row} | {"void"}
-- A job that begins further on than any task of it began before has its attempts anew, in its public
-- record too: `reached` is that place, 0 for encode, 1 + step, then decode.
-- A repeat by the same member gets the same answer; the task of another incarnation is void.
local record = redis.call('HMGET', KEYS[1], 'state', 'yield', 'started:' .. ARGV[2])
redis.call('XDEL', KEYS[2], ARGV[3])
if record[1] ~= 'queued' and record[1] ~= 'running' then return {'void'} end
local reply, rows = {'running', record[2]}, (#KEYS - 2) / 3
for r = 1, rows do
  local trajectory, job, events = KEYS[3 * r], KEYS[3 * r + 1], KEYS[3 * r + 2]
  if redis.call('HGET', trajectory, 'seq') == ARGV[1] then
    reply[#reply + 1] = '1'
    if not record[3] and record[1] == 'queued' then
      local have = redis.call('HMGET', trajectory, 'stage', 'step', 'reached')
      local at = have[1] == 'encode' and 0 or have[1] == 'denoise' and 1 + tonumber(have[2]) or 1000000000
      if at > tonumber(have[3] or '-1') then
        redis.call('HSET', trajectory, 'reached', at, 'attempts', '0')
        redis.call('HSET', job, 'attempts', '0')
      end
      redis.call('HSET', job, 'status', 'running', 'stage', ARGV[5], 'worker', ARGV[2])
      redis.call('HSETNX', job, 'started', ARGV[4])
      redis.call('HDEL', job, 'queue_position')
      redis.call('XADD', events, 'MAXLEN', '~', 256, '*', 'type', 'running', 'stage', ARGV[5],
        'worker', ARGV[2], 'at', ARGV[4])
    end
  else
    reply[#reply + 1] = '0'
  end
end
redis.call('HSET', KEYS[1], 'state', 'running', 'started:' .. ARGV[2], ARGV[4])
return reply
