-- Answer a push that cannot become a job: a failed record and a result, under each id given.
-- KEYS  1 leader string   2 jobs stream   then per id: job hash, result string, events stream
-- ARGV  1 nonce   2 entry id   3 at (ms)   4 job ttl (ms)   5 result ttl (ms)   6 content hash
--       7 error code   8 error   then per id: id, result bytes
-- Reply {"refused"|"fenced"}; an id that already has a record keeps it untouched.
-- The first write is a delete, so that this works at maxmemory too.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'fenced'} end
redis.call('XDEL', KEYS[2], ARGV[2])
local ids = (#KEYS - 2) / 3
for i = 1, ids do
  local job, result, events = KEYS[3 * i], KEYS[3 * i + 1], KEYS[3 * i + 2]
  local id, bytes = ARGV[7 + 2 * i], ARGV[8 + 2 * i]
  if redis.call('EXISTS', job) == 0 and redis.call('EXISTS', result) == 0 then
    redis.call('SET', result, bytes, 'PX', ARGV[5])
    redis.call('HSET', job, 'id', id, 'content', ARGV[6], 'status', 'failed', 'is_terminal', '1',
      'error_code', ARGV[7], 'error', ARGV[8], 'created', ARGV[3], 'finished', ARGV[3])
    redis.call('PEXPIRE', job, ARGV[4])
    redis.call('DEL', events)
    redis.call('XADD', events, '*', 'type', 'failed', 'error_code', ARGV[7], 'at', ARGV[3])
    redis.call('PEXPIRE', events, ARGV[5])
  end
end
return {'refused'}
