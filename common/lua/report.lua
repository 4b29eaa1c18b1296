-- A member ends a task, row by row. A row counts only while its job waits for this seq.
-- KEYS  1 task hash   2 reports stream   3 timeline stream
--       then per row: trajectory hash, job hash, events stream
-- ARGV  1 seq   2 member   3 at (ms)   4 record ttl (ms)   5 report message   6 is lead member "1"|"0"
--       7 entries the timeline keeps, 0 for none   8 its ttl (ms), anew at each entry
--       then per row: step, steps, next stage, handles, outputs, seconds, error code, error
--       (steps 0: the row is handed back as it was)
-- Reply {"done", accepted flags "1"|"0" per row} | {"void"} | {"unknown"}
-- A repeat gets its first answer. "void" or "0": nothing of it was recorded, and what the member
-- wrote for that row is its own to free. "unknown": the record has expired, so nobody can tell
-- whether an earlier try counted; free nothing. The first write is a delete (maxmemory).
-- The timeline has an entry for each task that ran, on each rank; docs/timeline.md has its fields.
local record = redis.call('HMGET', KEYS[1], 'state', 'answer:' .. ARGV[2], 'started:' .. ARGV[2], 'stage',
  'model', 'jobs', 'plan', 'yield')
if record[2] then
  local reply = {'done'}
  for flag in string.gmatch(record[2], '%d') do reply[#reply + 1] = flag end
  return reply
end
if not record[1] then return {'unknown'} end
-- The lead member may have reported, and ended the task, before the others.
if (record[1] ~= 'running' and record[1] ~= 'done') or not record[3] then return {'void'} end
redis.call('HDEL', KEYS[1], 'entries')
local reply, rows = {'done'}, (#KEYS - 3) / 3
local flags, ran = '', false
local reached, ends = {}, {}
local function count(trajectory, seconds)
  redis.call('HINCRBYFLOAT', trajectory, record[4] .. '_s', seconds)
  redis.call('HINCRBY', trajectory, 'chunks', 1)
end
for r = 1, rows do
  local a = 8 + 8 * (r - 1)
  local blank = ARGV[a + 7] == '' and ARGV[a + 2] == '0'
  reached[r] = ARGV[a + 1]
  ends[r] = blank and 'returned' or ARGV[6] == '0' and 'member' or ARGV[a + 7] ~= '' and 'error' or 'done'
  ran = ran or not blank
end
if ARGV[6] == '1' then
  for r = 1, rows do
    local trajectory, job, events = KEYS[3 * r + 1], KEYS[3 * r + 2], KEYS[3 * r + 3]
    local a = 8 + 8 * (r - 1)
    local flag = '0'
    if redis.call('HGET', trajectory, 'seq') == ARGV[1] then
      flag = '1'
      if ends[r] == 'returned' then
        redis.call('HSET', trajectory, 'seq', '0')
        redis.call('XADD', events, 'MAXLEN', '~', 256, '*', 'type', 'returned', 'at', ARGV[3])
      elseif ARGV[a + 7] ~= '' then
        count(trajectory, ARGV[a + 6])
        redis.call('HSET', trajectory, 'seq', '0', 'error_code', ARGV[a + 7], 'error', ARGV[a + 8])
        local attempts = redis.call('HINCRBY', trajectory, 'attempts', 1)
        redis.call('HSET', job, 'attempts', attempts)
        redis.call('XADD', events, 'MAXLEN', '~', 256, '*', 'type', 'error', 'error_code', ARGV[a + 7],
          'error', ARGV[a + 8], 'at', ARGV[3])
      else
        count(trajectory, ARGV[a + 6])
        redis.call('HDEL', trajectory, 'error_code', 'error')
        redis.call('HSET', trajectory, 'seq', '0', 'step', ARGV[a + 1], 'stage', ARGV[a + 3],
          'handles', ARGV[a + 4], 'outputs', ARGV[a + 5])
        redis.call('HSET', job, 'step', ARGV[a + 1], 'progress',
          string.format('%.3f', ARGV[a + 1] / math.max(1, ARGV[a + 2])))
        redis.call('XADD', events, 'MAXLEN', '~', 256, '*', 'type', 'chunk', 'step', ARGV[a + 1],
          'steps', ARGV[a + 2], 'next', ARGV[a + 3], 'at', ARGV[3])
      end
    elseif ends[r] ~= 'returned' then
      ends[r] = 'refused'
    end
    flags = flags .. flag
    reply[#reply + 1] = flag
  end
  redis.call('HSET', KEYS[1], 'state', 'done')
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
end
redis.call('HSET', KEYS[1], 'answer:' .. ARGV[2], flags)
if ran and ARGV[7] ~= '0' then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[7], '*', 'seq', ARGV[1], 'worker', ARGV[2],
    'stage', record[4], 'model', record[5] or '', 'start', record[3], 'end', ARGV[3],
    'yield', record[8] or '0', 'jobs', record[6], 'plan', record[7] or '',
    'reached', table.concat(reached, ' '), 'ends', table.concat(ends, ' '))
  redis.call('PEXPIRE', KEYS[3], ARGV[8])
end
redis.call('XADD', KEYS[2], '*', 'kind', 'report', 'seq', ARGV[1], 'worker', ARGV[2], 'flags', flags,
  'body', ARGV[5])
return reply
