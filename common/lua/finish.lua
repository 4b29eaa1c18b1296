-- The only end of an active job: outputs into place, result, last event, TTLs, outbox, all at once.
-- KEYS  1 leader string   2 active set   3 outbox stream   4 trajectory hash   5 job hash
--       6 result string   7 events stream   8 dead stream   9 celery hash
--       then per output: staged string, output string
--       then per worker that could free the job's state: worker hash, its stream
-- ARGV  1 nonce   2 id   3 status   4 result bytes   5 at (ms)   6 job ttl   7 output ttl   8 result ttl (ms)
--       9 error code   10 error   11 outbox body, "" for none   12 number of outputs
--       13 letters the dead stream keeps, 0: this end leaves none   14 "1": it ends for being late
-- Reply {"finished"|"gone"|"fenced"} | {"lost", n}: the n-th staged output is not there any more.
-- | {"done"}: it was to end for being late, and its last report has come: its result is kept.
-- The handles to free are those of the trajectory as it stands: a report may have replaced the ones
-- the leader knows. The first of the workers that is alive is told. The first write is a delete.
-- Into the outbox goes only what somebody waits for: an end with a body, or that of a Celery task.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'fenced'} end
if redis.call('EXISTS', KEYS[4]) == 0 then return {'gone'} end
local had = redis.call('HMGET', KEYS[4], 'handles', 'stage', 'step', 'attempts', 'trace', 'spec')
if ARGV[14] == '1' and had[2] == 'finish' then return {'done'} end
local last = 9 + 2 * tonumber(ARGV[12])
for k = 10, last, 2 do
  if redis.call('EXISTS', KEYS[k]) == 0 then return {'lost', (k - 10) / 2} end
end
local awaited = ARGV[11] ~= '' or redis.call('HEXISTS', KEYS[9], ARGV[2]) == 1
local handles = had[1]
redis.call('DEL', KEYS[4])
if ARGV[13] ~= '0' then
  redis.call('XADD', KEYS[8], 'MAXLEN', '~', ARGV[13], '*', 'job', ARGV[2], 'at', ARGV[5],
    'error_code', ARGV[9], 'error', ARGV[10], 'attempts', had[4] or '0', 'stage', had[2] or '',
    'step', had[3] or '0', 'trace', had[5] or '', 'spec', had[6] or '')
end
for k = 10, last, 2 do
  redis.call('RENAME', KEYS[k], KEYS[k + 1])
  redis.call('PEXPIRE', KEYS[k + 1], ARGV[7])
end
redis.call('SREM', KEYS[2], ARGV[2])
redis.call('SET', KEYS[6], ARGV[4], 'PX', ARGV[8])
redis.call('HSET', KEYS[5], 'status', ARGV[3], 'is_terminal', '1', 'finished', ARGV[5],
  'error_code', ARGV[9], 'error', ARGV[10])
redis.call('HDEL', KEYS[5], 'queue_position', 'eta', 'as_of', 'slack')
if ARGV[3] == 'succeeded' then redis.call('HSET', KEYS[5], 'progress', '1.000') end
redis.call('PEXPIRE', KEYS[5], ARGV[6])
redis.call('XADD', KEYS[7], 'MAXLEN', '~', 256, '*', 'type', ARGV[3], 'error_code', ARGV[9], 'at', ARGV[5])
redis.call('PEXPIRE', KEYS[7], ARGV[8])
if awaited then redis.call('XADD', KEYS[3], '*', 'job', ARGV[2], 'body', ARGV[11]) end
if handles and handles ~= '' then
  for k = last + 1, #KEYS, 2 do
    if redis.call('EXISTS', KEYS[k]) == 1 then
      redis.call('XADD', KEYS[k + 1], '*', 'kind', 'free', 'body', handles)
      if redis.call('PTTL', KEYS[k + 1]) < 0 then
        redis.call('PEXPIRE', KEYS[k + 1], 10 * math.max(1000, redis.call('PTTL', KEYS[k])))
      end
      break
    end
  end
end
return {'finished'}
