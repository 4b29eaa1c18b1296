-- Hand one task to its members: the record and every member's stream at once, or nothing.
-- KEYS  1 leader string   2 seq string   3 task hash   then M member streams,
--       then M worker hashes, then R trajectory hashes
-- ARGV  1 nonce   2 seq   3 at (ms)   4 M   5 R   6 message   7 stage   8 expected (ms)
--       9 members (space separated)   then per row: job id, step it must stand at
--       last three: model, plan (for the timeline, see report), ttl of the record (ms)
-- Reply {"dispatched"} | {"fenced"} | {"seq", last} | {"worker", name index} | {"row", job, why}
-- A repeat by the same leader gets the same answer. The first write is a delete, so that jobs
-- already accepted go on at maxmemory.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'fenced'} end
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
local seq = tonumber(ARGV[2])
if redis.call('HGET', KEYS[3], 'nonce') == ARGV[1] then return {'dispatched'} end
if last >= seq then return {'seq', last} end
local M, R = tonumber(ARGV[4]), tonumber(ARGV[5])
for m = 1, M do
  if redis.call('EXISTS', KEYS[3 + M + m]) == 0 then return {'worker', m} end
end
for r = 1, R do
  local have = redis.call('HMGET', KEYS[3 + 2 * M + r], 'seq', 'stage', 'step', 'cancel')
  local job = ARGV[8 + 2 * r]
  if not have[1] then return {'row', job, 'gone'} end
  if have[1] ~= '0' then return {'row', job, 'busy'} end
  if have[4] == '1' then return {'row', job, 'canceled'} end
  if have[2] ~= ARGV[7] then return {'row', job, 'stage'} end
  if have[2] == 'denoise' and have[3] ~= ARGV[9 + 2 * r] then return {'row', job, 'step'} end
end
redis.call('DEL', KEYS[3])
redis.call('SET', KEYS[2], ARGV[2])
local entries, jobs = {}, {}
for m = 1, M do
  local stream, worker = KEYS[3 + m], KEYS[3 + M + m]
  entries[m] = redis.call('XADD', stream, '*', 'kind', 'task', 'body', ARGV[6], 'seq', ARGV[2])
  -- A worker's stream goes after it; its next heartbeat renews this.
  if redis.call('PTTL', stream) < 0 then
    redis.call('PEXPIRE', stream, 10 * math.max(1000, redis.call('PTTL', worker)))
  end
end
for r = 1, R do
  redis.call('HSET', KEYS[3 + 2 * M + r], 'seq', ARGV[2])
  jobs[r] = ARGV[8 + 2 * r]
end
redis.call('HSET', KEYS[3], 'state', 'queued', 'stage', ARGV[7], 'expected', ARGV[8],
  'members', ARGV[9], 'jobs', table.concat(jobs, ' '), 'entries', table.concat(entries, ' '),
  'at', ARGV[3], 'yield', '0', 'nonce', ARGV[1], 'model', ARGV[#ARGV - 2], 'plan', ARGV[#ARGV - 1])
redis.call('PEXPIRE', KEYS[3], ARGV[#ARGV])
return {'dispatched'}
